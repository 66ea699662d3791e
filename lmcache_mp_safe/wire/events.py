"""What comes out of the wire layer."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NewType, TypeAlias

from lmcache_mp_safe.contract import PoolSegment
from lmcache_mp_safe.ids import ServerEpoch

SessionId = NewType("SessionId", int)
CallId = NewType("CallId", int)


class FailureKind(enum.Enum):
    TIMEOUT = "timeout"  # no answer within the deadline
    LOST = "lost"  # the server is away, or was when the call was made
    MALFORMED = "malformed"  # the answer makes no sense
    REFUSED = "refused"  # the server said no


@dataclass(frozen=True)
class LookupAnswered:
    """The first `found` objects of the sequence exist; read locks on them are held by the session."""

    call: CallId
    session: SessionId
    found: int


@dataclass(frozen=True)
class Retrieved:
    """Pool offset of each object that was asked for, in bytes."""

    call: CallId
    session: SessionId
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Reserved:
    """Pool offset by object index. An index that is absent got no slot: stored, being written by another, or no room.

    Attributes:
        lease_until: after this moment nothing may be copied into the slots and nothing committed.
    """

    call: CallId
    session: SessionId
    start: int
    offsets: Mapping[int, int]
    lease_until: float


@dataclass(frozen=True)
class Committed:
    """The server's answer to a commit."""

    call: CallId
    session: SessionId
    accepted: bool


@dataclass(frozen=True)
class CallFailed:
    """A call that will have no other answer. The session owes nothing for it: late answers are settled by the wire."""

    call: CallId
    session: SessionId
    kind: FailureKind
    detail: str


@dataclass(frozen=True)
class Connected:
    """A server is registered with and its pool is proven to be the one mapped here."""

    epoch: ServerEpoch
    segment: PoolSegment
    server_chunk: int


@dataclass(frozen=True)
class Lost:
    """The server of this epoch is gone, or no longer trusted. Every session is dead, every open call fails."""

    epoch: ServerEpoch
    why: str


SessionEvent: TypeAlias = LookupAnswered | Retrieved | Reserved | Committed | CallFailed
WireEvent: TypeAlias = SessionEvent | Connected | Lost
