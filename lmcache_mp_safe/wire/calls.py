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
from lmcache_mp_safe.wire.sessions import Reservation


class Kind(enum.Enum):
    LOOKUP = enum.auto()
    RETRIEVE = enum.auto()
    RESERVE = enum.auto()
    COMMIT = enum.auto()
    SETTLE = enum.auto()  # what gives back, and the end of a session: nobody waits for the answer


@dataclass
class Call:
    """A call that the server has not answered.

    Attributes:
        told: its caller was told that it timed out.
        given_up: nobody counts on an answer any more.
        inherited: a lookup that an earlier connection sent; it may have been told what was found.
        reservation: what a commit, or a call that gives back, publishes; `start` is the call that asked for it.
        asked_at: when the lookup's status was asked for last. questions: how often since it was late.
        ends: key and instance of the retrieve that the call ends.
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
    given_up: bool = False
    inherited: bool = False
    reservation: Reservation | None = None
    asked_at: float = 0.0
    questions: int = 0
    ends: tuple[Any, int] | None = None


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
    granted: dict[CallId, Reservation] = field(default_factory=dict)  # what it has to publish yet
    open: dict[CallId, Call] = field(default_factory=dict)

    def has_room(self, calls: int, most: int) -> bool:
        """Whether so many more calls may be queued when `most` may be unanswered."""
        return len(self.open) + calls <= most

    def being_written(self, now: float) -> Iterator[int]:
        """Offsets of slots that are ours to write, for the time of their lease."""
        for reservation in self.granted.values():
            if now <= reservation.lease_until and not reservation.given_back:
                yield from reservation.offsets

    @property
    def is_still_mapped(self) -> bool:
        """Whether the mapped pool is the one that has the server's name for it by now."""
        pool = self.connection.pool
        try:
            return pool.is_alive and pool.path.stat().st_ino == pool.inode
        except OSError:
            return False
