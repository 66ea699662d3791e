"""A wire with a small server behind it, for tests of the scheduler half: answers come when the test says so.

It keeps what the real server keeps: objects by chain, write reservations, read locks that are anonymous counts, and
one flat pool. It refuses what would be a lock imbalance on the real one, so a test that ends with `check_settled` shows
that every lock was released exactly once.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from lmcache_mp_safe.contract import PoolSegment
from lmcache_mp_safe.errors import LocalError
from lmcache_mp_safe.ids import ServerEpoch
from lmcache_mp_safe.wire import (
    CallFailed,
    CallId,
    Committed,
    FailureKind,
    LookupAnswered,
    Lost,
    Reserved,
    Retrieved,
    SessionId,
    WireEvent,
)

# A stored object is named by the chain of digests up to it and by the salt.
_Key = tuple[str, tuple[bytes, ...]]


@dataclass
class _Session:
    salt: str
    chain: list[bytes]
    locked: set[int] = field(default_factory=set)
    retrieved: range = range(0)
    closed: bool = False

    def key(self, index: int) -> _Key:
        return self.salt, tuple(self.chain[: index + 1])


@dataclass
class FakePool:
    """The server's memory."""

    memory: bytearray

    def read(self, offset: int, length: int) -> bytes:
        if not 0 <= offset <= offset + length <= len(self.memory):
            raise LocalError(f"read outside of the pool: {offset} + {length}")
        return bytes(self.memory[offset : offset + length])


class FakeWire:
    """Stands in for `lmcache_mp_safe.wire.Wire`.

    Attributes:
        stored: offset of each readable object.
        writing: offset of each reserved object that was not committed.
        locks: read locks by object.
        capacity: objects that fit into the pool.
        lose: kinds of calls ("lookup", "retrieve", "reserve", "commit") whose next answer is lost, in order.
        refuse_commits: commits are answered with False.
        held_back: while True, answers wait.
        owes: something on the server is not ended yet.
        namespace: part of the seals.
    """

    def __init__(self, object_bytes: int, capacity: int = 64, lease_s: float = 60.0) -> None:
        self.object_bytes = object_bytes
        self.capacity = capacity
        self.lease_s = lease_s
        self.pool: FakePool | None = FakePool(bytearray(object_bytes * capacity))
        self.stored: dict[_Key, int] = {}
        self.writing: dict[_Key, int] = {}
        self.locks: Counter[_Key] = Counter()
        self.lose: list[str] = []
        self.refuse_commits = False
        self.held_back = self.owes = False
        self.log: list[str] = []
        self.up = True
        self.namespace = ""
        self.why_down = ""
        self.has_tried = True
        self.epoch = ServerEpoch(1)
        self._numbers = itertools.count(1)
        self._sessions: dict[SessionId, _Session] = {}
        self._reservations: dict[CallId, list[_Key]] = {}
        self._answers: list[WireEvent] = []
        self.started = self.was_shut_down = False

    # --- life -------------------------------------------------------------------------------------------------------

    @property
    def segment(self) -> PoolSegment | None:
        return PoolSegment(self.epoch, "fake", len(self.pool.memory), 1) if self.up and self.pool else None

    @property
    def unsettled(self) -> bool:
        return bool(self._answers)

    @property
    def unanswered(self) -> int:
        return len(self._answers)

    def start(self, now: float) -> None:
        self.started = True

    def shutdown(self, deadline_s: float) -> None:
        self.was_shut_down = True

    def poll(self, now: float) -> list[WireEvent]:
        if self.held_back:
            return []
        answers, self._answers = self._answers, []
        return answers

    def restart_server(self) -> None:
        """The server dies with everything it has; a new one is up at once."""
        self.stored.clear()
        self.writing.clear()
        self.locks.clear()
        self._sessions.clear()
        self._reservations.clear()
        self._answers = [Lost(self.epoch, "restarted")]
        self.epoch = ServerEpoch(self.epoch + 1)

    def stand_still(self) -> None:
        """The server is given up, and goes on at once with everything it has."""
        self._answers = [Lost(self.epoch, "no answer")]
        self.epoch = ServerEpoch(self.epoch + 1)

    def lose_server(self) -> None:
        """The server dies, and none comes back."""
        self.restart_server()
        self.up, self.why_down = False, "dead"

    def evict(self, *, keep: int = 0) -> None:
        """Drop all readable, unlocked objects but the `keep` oldest."""
        for key in [k for k in list(self.stored)[keep:] if not self.locks[k]]:
            del self.stored[key]

    def check_settled(self) -> None:
        """Every lock released and every session closed."""
        open_sessions = [number for number, session in self._sessions.items() if not session.closed]
        assert +self.locks == Counter(), f"read locks left: {+self.locks}"
        assert not open_sessions, f"sessions left open: {open_sessions}"

    # --- sessions ---------------------------------------------------------------------------------------------------

    def open(self, digests: Sequence[bytes], salt: str = "") -> SessionId:
        number = SessionId(next(self._numbers))
        self._sessions[number] = _Session(salt, list(digests))
        return number

    def extend(self, session: SessionId, digests: Sequence[bytes]) -> None:
        self._sessions[session].chain.extend(digests)

    def close(self, session: SessionId, now: float) -> None:
        record = self._sessions.get(session)
        if record is None or record.closed:
            return
        record.closed = True
        self.log.append(f"close {session}")
        # Answers under way are settled by the wire itself.
        self._answers = [a for a in self._answers if getattr(a, "session", None) != session]
        self._unlock(record, record.locked | set(record.retrieved))

    def close_in_order(self, sessions: Sequence[SessionId], now: float) -> None:
        for session in sessions:
            self.close(session, now)

    # --- calls ------------------------------------------------------------------------------------------------------

    def lookup(self, session: SessionId, objects: int, now: float) -> CallId:
        record, call = self._begin("lookup", session)
        if objects > len(record.chain):
            raise LocalError(f"session {session} has {len(record.chain)} objects, not {objects}")
        if self._lost("lookup", call, session):
            return call
        found = 0
        while found < objects and record.key(found) in self.stored:
            found += 1
        for index in range(found):
            self.locks[record.key(index)] += 1
        record.locked |= set(range(found))
        self._answers.append(LookupAnswered(call, session, found))
        return call

    def retrieve(self, session: SessionId, start: int, end: int, now: float) -> CallId:
        record, call = self._begin("retrieve", session)
        wanted = set(range(start, end))
        if not wanted <= record.locked:
            raise LocalError("retrieve without locks")
        if self._lost("retrieve", call, session):
            return call
        record.locked -= wanted
        record.retrieved = range(start, end)
        self._answers.append(Retrieved(call, session, tuple(self.stored[record.key(i)] for i in range(start, end))))
        return call

    def done_reading(self, session: SessionId, now: float) -> None:
        record = self._sessions.get(session)
        if record is not None and not record.closed:
            self._unlock(record, set(record.retrieved))
            record.retrieved = range(0)

    def free(self, session: SessionId, start: int, end: int, now: float) -> None:
        record = self._sessions[session]
        wanted = set(range(start, end))
        if not wanted <= record.locked:
            raise LocalError("free of locks that are not held")
        self._unlock(record, wanted)

    def reserve(self, session: SessionId, start: int, end: int, now: float) -> CallId:
        record, call = self._begin("reserve", session)
        if end > len(record.chain):
            raise LocalError(f"session {session} has {len(record.chain)} objects, not {end}")
        if self._lost("reserve", call, session):
            return call
        keys = [record.key(index) for index in range(start, end)]
        free = [key for key in keys if key not in self.stored and key not in self.writing]
        taken = {*self.stored.values(), *self.writing.values()}
        slots = [n * self.object_bytes for n in range(self.capacity) if n * self.object_bytes not in taken]
        if len(slots) < len(free):
            free = []  # all or nothing, as the real server allocates
        offsets = dict(zip(free, slots, strict=False))
        self.writing |= offsets
        self._reservations[call] = free
        answer = {start + keys.index(key): offset for key, offset in offsets.items()}
        self._answers.append(Reserved(call, session, start, answer, now + self.lease_s))
        return call

    def commit(self, session: SessionId, reserve_call: CallId, now: float) -> CallId:
        _, call = self._begin("commit", session)
        if self._lost("commit", call, session):
            return call
        if not self.refuse_commits:
            for key in self._reservations.pop(reserve_call):
                self.stored[key] = self.writing.pop(key)
        self._answers.append(Committed(call, session, not self.refuse_commits))
        return call

    def give_back(self, reserve_call: CallId, now: float) -> None:
        for key in self._reservations.pop(reserve_call, []):
            self.stored[key] = self.writing.pop(key)
            self.log.append("give back")

    def leave(self, reserve_call: CallId) -> None:
        self._reservations.pop(reserve_call, None)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _begin(self, what: str, session: SessionId) -> tuple[_Session, CallId]:
        record = self._sessions[session]
        if record.closed:
            raise LocalError(f"{what} on a closed session")
        self.log.append(f"{what} {session}")
        return record, CallId(next(self._numbers))

    def _lost(self, what: str, call: CallId, session: SessionId) -> bool:
        if what not in self.lose:
            return False
        self.lose.remove(what)
        self._answers.append(CallFailed(call, session, FailureKind.TIMEOUT, f"{what} lost"))
        return True

    def _unlock(self, record: _Session, indices: set[int]) -> None:
        for index in indices & (record.locked | set(record.retrieved)):
            self.locks[record.key(index)] -= 1
        record.locked -= indices
