"""One sequence of objects on the server, and which of its locks are ours. Pure.

A session owns the read locks that its lookup took until it gives them back: by freeing them, by ending the retrieve
that uses them, or by closing. Each is released exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from lmcache_mp_safe.errors import LocalError
from lmcache_mp_safe.wire.events import CallId, SessionId
from lmcache_mp_safe.wire.tokens import encoded_object, token_array


@dataclass
class Reservation:
    """Slots that the server has granted, or may have, and that are not published yet.

    Attributes:
        instance: the one that they are noted for.
        sent: when they were asked for. lease_until: when our own time with them is over.
        offsets: where they are; unknown if the answer made no sense or never came.
        given_back: nobody writes into them any more, and nobody is going to commit them.
    """

    key: Any
    instance: int
    sent: float
    lease_until: float
    offsets: tuple[int, ...] = ()
    given_back: bool = False


@dataclass
class Session:
    """A chained sequence under a server session of its own.

    Attributes:
        name: the server's session id, unique in the world and never used for another sequence: the server caches chunk
            hashes by position under it.
        locked: ranges of objects whose read locks this session holds.
        locked_at: when the lookup that took them was sent.
        reading: key of the open retrieve, whose commit releases its locks. reader: the instance that it is noted for.
        reading_at: pool offsets of what is being read.
        reservations: those that were not committed, by the call that asked for them.
        running: calls without an answer; of those that have timed out the ones that may own something on the server.
        looking_up: the lookup that was not answered, timed out or not: its locks are not known yet.
        used: whether the server knows the session.
        after: a session that has to end first.
    """

    number: SessionId
    name: str
    salt: str
    digests: list[bytes] = field(default_factory=list)
    locked: list[range] = field(default_factory=list)
    locked_at: float = 0.0
    reading: Any = None
    reader: int = 0
    reading_at: tuple[int, ...] = ()
    reservations: dict[CallId, Reservation] = field(default_factory=dict)
    running: set[CallId] = field(default_factory=set)
    looking_up: CallId | None = None
    used: bool = False
    closing: bool = False
    after: SessionId | None = None
    _encoded: list[bytes] = field(default_factory=list)

    def tokens(self, objects: int, chunk: int, suffix: Sequence[int] = ()) -> msgspec.Raw:
        """The synthetic tokens of the first `objects` objects, and the suffix behind them."""
        if objects > len(self.digests):
            raise LocalError(f"session {self.number} has {len(self.digests)} objects, not {objects}")
        self._encoded += [encoded_object(digest, chunk) for digest in self.digests[len(self._encoded) : objects]]
        return token_array(self._encoded[:objects], chunk, suffix)

    def lock(self, found: int, sent: float) -> None:
        """A lookup that was sent at this moment locked the first `found` objects."""
        if self.locked:
            raise LocalError(f"session {self.number} holds locks of an earlier lookup")
        self.locked_at = sent
        if found:
            self.locked = [range(found)]

    def read(self, key: Any, instance: int, sent: float) -> None:
        """A retrieve is open, and may have used locks taken at `sent` at the latest."""
        self.reading, self.reader = key, instance
        self.locked_at = self.locked_at or sent

    def unlock(self, start: int, end: int) -> None:
        """These locks are no longer this session's to release.

        Raises:
            LocalError: one of them is not held.
        """
        for position, held in enumerate(self.locked):
            if held.start <= start and end <= held.stop:
                rest = [range(held.start, start), range(end, held.stop)]
                self.locked[position : position + 1] = [part for part in rest if part]
                return
        raise LocalError(f"session {self.number} does not hold the locks [{start}, {end})")
