"""What is under way on one connection: plain records, moved on by `wire.py`."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from lmcache_mp_safe.contract import PoolSegment
from lmcache_mp_safe.ids import ServerEpoch
from lmcache_mp_safe.wire.connecting import Connection
from lmcache_mp_safe.wire.events import CallId, SessionId


class Kind(enum.Enum):
    LOOKUP = enum.auto()
    RETRIEVE = enum.auto()
    RESERVE = enum.auto()
    COMMIT = enum.auto()
    SETTLE = enum.auto()  # free, end of a retrieve, end of a session: nobody waits for the answer


@dataclass
class Call:
    """A call that the server has not answered.

    Attributes:
        told: its caller was told that it timed out.
        inherited: a lookup that an earlier connection sent; it may have been told what was found.
    """

    number: CallId
    kind: Kind
    session: SessionId
    future: Any
    deadline: float
    start: int = 0
    end: int = 0
    key: Any = None
    sent: float = 0.0
    acknowledged: bool = False  # LOOKUP: the lookup itself is; the future is a status question
    ask_again_at: float = 0.0
    told: bool = False
    inherited: bool = False


@dataclass(frozen=True)
class Grant:
    """A reservation that the server has granted, or may have: its slots are unknown if its answer made no sense."""

    offsets: tuple[int, ...] = ()
    lease_until: float = 0.0


@dataclass
class Link:
    """The connection in use."""

    connection: Connection
    epoch: ServerEpoch
    segment: PoolSegment
    beat: Any = None
    beat_deadline: float = 0.0
    next_beat: float = 0.0
    doubted: bool = False
    late: int = 0  # calls in `open` that have timed out
    granted: dict[CallId, Grant] = field(default_factory=dict)  # reservations that were not committed
    open: dict[CallId, Call] = field(default_factory=dict)

    def has_room(self, calls: int, most: int) -> bool:
        """Whether so many more calls may be queued when `most` may be unanswered."""
        return len(self.open) + calls <= most

    def being_written(self, now: float) -> Iterator[int]:
        """Offsets of slots that are ours to write, for the time of their lease."""
        for grant in self.granted.values():
            if now <= grant.lease_until:
                yield from grant.offsets

    @property
    def is_still_mapped(self) -> bool:
        """Whether the mapped pool is the one that has the server's name for it by now."""
        pool = self.connection.pool
        try:
            return pool.is_alive and pool.path.stat().st_ino == pool.inode
        except OSError:
            return False
