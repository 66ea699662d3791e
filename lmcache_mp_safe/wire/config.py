"""Settings of the wire layer."""

from __future__ import annotations

from dataclasses import dataclass

from lmcache_mp_safe.ids import ServerEpoch

_FIRST_EPOCH = ServerEpoch(1)


@dataclass(frozen=True)
class WireConfig:
    """How to reach the server. Times in seconds.

    Attributes:
        namespace: the model's name on the server.
        object_bytes: size of every object; a multiple of 4096.
        lookup_timeout_s: deadline of a lookup, its status questions included.
        lease_s: age at which a reservation is over.
        lock_time_s: age from which read locks are left to the server, which takes them back at 300 s (its
            `--l1-read-ttl-seconds`).
        write_time_s: age from which reservations are left to the server, which gives their slots to the next writer at
            600 s (its `--l1-write-ttl-seconds`).
        max_unanswered_calls: no more are queued; when this many have timed out, the server is given up and a new client
            made. LMCache's client thread is shared by the whole process and blocks after about a thousand.
        first_epoch: number of the first epoch.
    """

    url: str
    namespace: str
    object_bytes: int
    call_timeout_s: float = 10.0
    lookup_timeout_s: float = 3.0
    heartbeat_s: float = 10.0
    lease_s: float = 60.0
    lock_time_s: float = 240.0
    write_time_s: float = 480.0
    connect_timeout_s: float = 10.0
    backoff_max_s: float = 30.0
    max_unanswered_calls: int = 256
    first_epoch: ServerEpoch = _FIRST_EPOCH
