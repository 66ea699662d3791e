"""A server that stands still, or an answer that is lost, at each call of a request's life: then nothing is left.

The whole kind at once: every operation that the wire sends, each with each fault, against the model of the server.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress

import pytest

from lmcache_mp_safe.errors import LocalError
from lmcache_mp_safe.testing.fake_server import Call, FakeMaker, FakeServer, SharedMemory, carry, reply_to
from lmcache_mp_safe.wire import (
    CallFailed,
    CallId,
    LookupAnswered,
    Lost,
    Reserved,
    Retrieved,
    SessionId,
    Wire,
    WireConfig,
)

OBJECT = 8192
CONFIG = WireConfig("tcp://127.0.0.1:1", "ns", OBJECT)
DIGESTS = [bytes([n]) * 32 for n in range(4)]
OPERATIONS = (
    "prepare_store",
    "commit_store",
    "lookup",
    "query_prefetch_status",
    "free_lookup_locks",
    "prepare_retrieve",
    "commit_retrieve",
    "end_session",
)
# Long enough for deadlines, for calls to be given up, and for new connections.
LONG_S = 120
# Longer than the server keeps locks and sessions.
SERVER_S = 700
# No hook is called; longer than the server keeps locks.
IDLE_S = 400.0


class Line:
    """Between one client and the server.

    Attributes:
        freeze_at, drop_at: the operation whose next call finds the server standing still; with the second one, what
            waits is lost with its client.
        lose_at: the operation whose next answer is lost.
        idle_at: the operation after whose next call the engine does nothing for a long time.
    """

    def __init__(self, server: FakeServer) -> None:
        self.server = server
        self.freeze_at = self.drop_at = self.lose_at = self.idle_at = ""
        self.frozen = self.struck = self.idle = False
        self._waiting: deque[Call] = deque()

    def __call__(self, call: Call) -> None:
        self.frozen |= call.operation in (self.freeze_at, self.drop_at)
        if self.frozen:
            self.struck = True
            self._waiting.append(call)
        elif call.operation == self.lose_at and not self.struck:
            self.struck, self.idle = True, call.operation == self.idle_at
            reply_to(call, self.server)
        elif call.operation == self.idle_at and not self.struck:
            self.struck = self.idle = True
            carry(call, self.server)
        else:
            carry(call, self.server)

    def thaw(self) -> None:
        """The server goes on with what it was sent, also by clients that are closed by now."""
        if self.drop_at:
            self._waiting.clear()
        self.freeze_at, self.drop_at, self.frozen = "", "", False
        while self._waiting:
            carry(self._waiting.popleft(), self.server)


class Life:
    """A store, then a hit, as the scheduler half would have them; what fails is given back and closed."""

    def __init__(self, memory: SharedMemory) -> None:
        self.now = 0.0
        self.server = FakeServer(lambda: self.now, memory, shm_name=memory.name)
        self.line = Line(self.server)
        self.maker = FakeMaker(self.server, lambda: self.line)
        self.wire = Wire(CONFIG, maker=self.maker)  # type: ignore[arg-type]
        self.granted: list[CallId] = []
        self.writing = False  # workers still copy
        self.wire.start(self.now)
        self.pass_time(1)

    def pass_time(self, seconds: int) -> list[object]:
        events: list[object] = []
        for _ in range(10 * seconds):
            self.now += 0.1
            if self.line.idle:
                self.line.idle = False
                self.now += IDLE_S
            self.maker.reachable = not self.line.frozen
            for event in self.wire.poll(self.now):
                events.append(event)
                if isinstance(event, Lost) and not self.writing:
                    self.give_back()
        return events

    def give_back(self) -> None:
        for call in self.granted:
            self.wire.give_back(call, self.now)
        self.granted.clear()

    def close(self, *sessions: SessionId) -> None:
        self.wire.close_in_order(sessions, self.now)
        self.pass_time(1)

    def store(self) -> None:
        session = self.wire.open(DIGESTS)
        self.wire.reserve(session, 0, 4, self.now)
        for event in self.pass_time(1):
            if isinstance(event, Reserved):
                self.granted.append(event.call)
                with suppress(LocalError):  # its lease is over
                    self.wire.commit(session, event.call, self.now)
        self.pass_time(LONG_S // 4 if self.line.struck else 1)
        self.give_back()
        self.close(session)

    def hit(self) -> int:
        """Objects that were found."""
        session, found = self.wire.open(DIGESTS), 0
        self.wire.lookup(session, 4, self.now)
        for event in self.pass_time(1):
            if isinstance(event, LookupAnswered):
                found = event.found
        if found:
            self.wire.free(session, 0, 1, self.now)
            self.wire.retrieve(session, 1, found, self.now)
            if any(isinstance(event, Retrieved) for event in self.pass_time(1)):
                self.wire.done_reading(session, self.now)
        self.pass_time(LONG_S // 4 if self.line.struck else 1)
        self.close(session)
        return found

    def left(self) -> dict[str, object]:
        objects = self.server.objects
        held = self.wire.held()
        return {
            name: there
            for name, there in {
                "locks": objects.locked(objects.readable),
                "reads": self.server.reads,
                "writes": self.server.writes,
                "reserved": objects.reserved,
                "lookups": self.server.lookups,
                "sessions": self.server.sessions,
                "held": [n for n in (held.sessions, held.locks, held.retrieves) if n],
            }.items()
            if there
        }


@pytest.fixture
def life() -> Iterator[Life]:
    memory = SharedMemory(64 * OBJECT)
    yield Life(memory)
    memory.close()


def live_through(life: Life) -> None:
    life.store()
    life.hit()
    life.pass_time(LONG_S)
    life.line.thaw()
    life.pass_time(LONG_S)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("fault", ["freeze_at", "drop_at", "lose_at", "idle_at", "lose_at idle_at"])
@pytest.mark.parametrize("lookup_s", [0.0, 0.15], ids=["quick", "running"])
def test_nothing_is_left_on_a_server_that_failed_at_any_call_and_goes_on(
    life: Life, operation: str, fault: str, lookup_s: float
) -> None:
    """`lookup_s`: with the longer time, the first question about a lookup finds it running."""
    life.server.lookup_s = lookup_s
    for kind in fault.split():
        setattr(life.line, kind, operation)
    live_through(life)
    assert life.line.struck, "the fault did not happen"
    if fault == "drop_at":  # of a free, or of the end of a session, nobody knows that it was lost: they run out
        life.pass_time(SERVER_S)
    assert life.left() == {}
    assert life.wire.up
    assert not life.wire.owes
    life.line.struck, life.line.lose_at, life.line.idle_at = False, "", ""
    life.store()
    assert life.hit() == 4


@pytest.mark.parametrize("operation", OPERATIONS)
def test_nothing_is_left_on_a_server_that_stood_still_when_the_engine_ended_and_goes_on(
    life: Life, operation: str
) -> None:
    life.line.freeze_at = operation
    sequence = life.wire.open(DIGESTS)
    life.wire.reserve(sequence, 0, 4, life.now)
    for event in life.pass_time(1):
        if isinstance(event, Reserved):
            life.wire.commit(sequence, event.call, life.now)
    life.close(sequence)
    session = life.wire.open(DIGESTS)
    life.wire.lookup(session, 4, life.now)
    if any(isinstance(event, LookupAnswered) for event in life.pass_time(1)):
        life.wire.free(session, 0, 1, life.now)
        life.wire.retrieve(session, 1, 4, life.now)
        if any(isinstance(event, Retrieved) for event in life.pass_time(1)):
            life.wire.done_reading(session, life.now)
            life.close(session)
    assert life.line.struck
    life.wire.shutdown(0.0)
    life.line.thaw()
    assert life.left() == {}


@pytest.mark.parametrize("operation", ["lookup", "query_prefetch_status", "prepare_retrieve"])
def test_a_wire_owes_until_a_server_that_stood_still_has_everything_back(life: Life, operation: str) -> None:
    """Whoever leaves it, for another namespace, has to look after it until then."""
    life.store()
    life.line.freeze_at = operation
    life.hit()
    assert life.line.frozen
    assert life.wire.owes
    life.pass_time(LONG_S)
    assert life.wire.owes
    life.line.thaw()
    life.pass_time(LONG_S)
    assert not life.wire.owes
    assert life.left() == {}


@pytest.mark.parametrize("operation", ["prepare_store", "commit_store"])
def test_a_wire_that_gives_no_slots_back_is_noticed(
    life: Life, operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Wire, "_publish", lambda *_: None)
    life.line.freeze_at = operation
    life.line.thaw = lambda: setattr(life.line, "frozen", False)  # type: ignore[method-assign]
    live_through(life)
    assert life.left()


def test_slots_of_a_lost_server_are_given_back_only_when_the_last_copy_into_them_has_ended(life: Life) -> None:
    """One that was published may be evicted, and its memory be another object's."""
    session = life.wire.open(DIGESTS)
    call = life.wire.reserve(session, 0, 4, life.now)
    life.pass_time(1)
    life.granted, life.writing = [call], True
    life.line.frozen = True
    assert any(isinstance(event, Lost) for event in life.pass_time(30))
    life.line.thaw()
    life.pass_time(60)
    assert life.wire.up
    assert life.server.objects.reserved, "published while it was written"
    life.give_back()
    life.pass_time(1)
    assert life.left() == {}


def test_slots_that_were_asked_for_when_the_server_was_lost_are_given_back_by_themselves(life: Life) -> None:
    life.line.freeze_at = "prepare_store"
    life.wire.reserve(life.wire.open(DIGESTS), 0, 4, life.now)
    assert [type(event) for event in life.pass_time(30)] == [CallFailed, Lost]
    life.line.thaw()
    life.pass_time(30)
    assert life.left() == {}
    assert len(life.server.objects.readable) >= 4
