"""Any order of calls, answers, failures and delays: at rest every lock is released exactly once and nothing is left."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from lmcache_mp_safe.testing.fake_client import FakeMaker, ServerModel, slots
from lmcache_mp_safe.testing.received import as_received
from lmcache_mp_safe.wire import LookupAnswered, Lost, Reserved, Retrieved, SessionId, Wire, WireConfig

OBJECT = 4096
POOL = 64 * OBJECT
CHUNK = 40
OBJECTS = 6
# Delays pass deadlines, but never the time after which the wire layer gives a late lookup up.
CONFIG = WireConfig("tcp://127.0.0.1:1", "ns", OBJECT, call_timeout_s=2.0, lookup_timeout_s=1.0, heartbeat_s=1000.0)
MAX_DELAYS = 12


class WireMachine(RuleBasedStateMachine):
    """Drives one wire against the model; `held` is what the caller may use, kept with plain sets."""

    sessions: Bundle[SessionId] = Bundle("sessions")

    @initialize(stored=st.integers(0, OBJECTS))
    def begin(self, stored: int) -> None:
        self.segment = Path("/dev/shm") / f"lmcache_mp_safe_wire_{uuid.uuid4().hex}"
        self.segment.touch(mode=0o600)
        os.truncate(self.segment, POOL)
        self.maker = FakeMaker(self.segment.name, POOL, CHUNK)
        self.model = ServerModel(OBJECT, CHUNK, stored)
        self.wire = Wire(CONFIG, maker=self.maker)  # type: ignore[arg-type]
        self.now, self.delays = 0.0, 0
        self.looked_up: set[SessionId] = set()
        self.free: dict[SessionId, set[int]] = {}
        self.busy: set[SessionId] = set()  # a retrieve is open or unanswered
        self.reserved: dict[SessionId, list[Reserved]] = {}
        self.granted: set[object] = set()  # on the server
        self.wire.start(self.now)
        self.poll()

    def teardown(self) -> None:
        if not hasattr(self, "wire"):
            return
        try:
            self.finish()
        finally:
            self.wire.shutdown(0.0)
            self.segment.unlink()

    def finish(self) -> None:
        """Close everything, answer everything: nothing may be left."""
        for session in list(self.wire._sessions):
            self.give_back(session)
            self.wire.close(session, self.now)
        for _ in range(12):
            for call in self.maker.client.open_calls:
                self.serve(call)
            self.now += 0.05
            self.poll()
        self.model.check_settled()
        assert not self.granted, "slots that nobody can store into"
        held = self.wire.held()
        assert (held.sessions, held.locks, held.retrieves, held.unanswered) == (0, 0, 0, 0)

    def serve(self, call: object, *, fail: bool = False, running: bool = False) -> None:
        name = call.name  # type: ignore[attr-defined]
        if name == "register":
            call.answer(self.maker.registered())  # type: ignore[attr-defined]
        elif name == "reserve":
            key = call.arguments[0]  # type: ignore[attr-defined]
            self.model.sessions.add(key.request_id)
            self.granted.add(as_received(key))
            indices = range((key.end - key.start) // CHUNK)
            call.answer(slots([i * OBJECT for i in indices], OBJECT, indices))  # type: ignore[attr-defined]
        elif name == "commit":
            key = as_received(call.arguments[0])  # type: ignore[attr-defined]
            call.answer(key in self.granted)  # type: ignore[attr-defined]
            self.granted.discard(key)
        else:
            self.model.serve(call, fail_retrieve=fail, still_running=running)  # type: ignore[arg-type]

    def poll(self) -> None:
        for call in self.maker.client.open_calls if self.maker.clients else ():
            if call.name == "register":
                self.serve(call)  # the server is alive all the time; epochs are another test's business
        for event in self.wire.poll(self.now):
            assert not isinstance(event, Lost)
            match event:
                case LookupAnswered(session=session, found=found):
                    self.free[session] = set(range(found))
                case Retrieved(session=session, offsets=offsets):
                    assert len(set(offsets)) == len(offsets)
                case Reserved(session=session):
                    self.reserved.setdefault(session, []).append(event)

    @rule(target=sessions)
    def open(self) -> SessionId:
        return self.wire.open([bytes([n]) * 32 for n in range(OBJECTS)])

    @rule(session=sessions, objects=st.integers(1, OBJECTS))
    def look_up(self, session: SessionId, objects: int) -> None:
        if session not in self.looked_up:
            self.looked_up.add(session)
            self.wire.lookup(session, objects, self.now)

    @rule(session=sessions, data=st.data())
    def retrieve(self, session: SessionId, data: st.DataObject) -> None:
        if (span := self.some_span(session, data)) and session not in self.busy:
            self.busy.add(session)
            self.wire.retrieve(session, *span, self.now)

    @rule(session=sessions, data=st.data())
    def free_some(self, session: SessionId, data: st.DataObject) -> None:
        if span := self.some_span(session, data):
            self.wire.free(session, *span, self.now)

    def some_span(self, session: SessionId, data: st.DataObject) -> tuple[int, int] | None:
        """A range of locks that the caller holds, taken from it."""
        locked = self.free.get(session)
        if not locked:
            return None
        start = data.draw(st.sampled_from(sorted(locked)))
        end = start + 1
        while end in locked and data.draw(st.booleans()):
            end += 1
        locked -= set(range(start, end))
        return start, end

    @rule(session=sessions)
    def done(self, session: SessionId) -> None:
        self.wire.done_reading(session, self.now)

    @rule(session=sessions, start=st.integers(0, OBJECTS - 1))
    def reserve(self, session: SessionId, start: int) -> None:
        self.wire.reserve(session, start, OBJECTS, self.now)

    @rule(session=sessions)
    def commit(self, session: SessionId) -> None:
        if self.reserved.get(session):
            reserved = self.reserved[session].pop()
            if self.now <= reserved.lease_until:
                self.wire.commit(session, reserved.call, self.now)

    @rule(some=st.lists(consumes(sessions), max_size=3, unique=True))
    def close(self, some: list[SessionId]) -> None:
        self.wire.close_in_order(some, self.now)
        for session in some:
            self.free.pop(session, None)
            self.give_back(session)

    def give_back(self, session: SessionId) -> None:
        for reserved in self.reserved.pop(session, ()):
            self.wire.give_back(reserved.call, self.now)

    @rule(data=st.data(), fail=st.booleans(), running=st.booleans())
    def answer_one(self, data: st.DataObject, fail: bool, running: bool) -> None:
        if waiting := self.maker.client.open_calls:
            self.serve(data.draw(st.sampled_from(waiting)), fail=fail, running=running)

    @rule()
    def answer_all(self) -> None:
        for call in self.maker.client.open_calls:
            self.serve(call)

    @rule(session=sessions)
    def refuse_retrieve(self, session: SessionId) -> None:
        for call in self.maker.client.open_calls:
            if call.name == "retrieve":
                self.serve(call, fail=True)

    @rule()
    def poll_now(self) -> None:
        self.poll()

    @rule(seconds=st.floats(0.01, 4.0))
    def wait(self, seconds: float) -> None:
        if self.delays < MAX_DELAYS:
            self.delays += 1
            self.now += seconds
            self.poll()

    @invariant()
    def no_lock_is_negative(self) -> None:
        if hasattr(self, "model"):
            assert all(count >= 0 for count in self.model.locks.values())


TestWireMachine = WireMachine.TestCase
TestWireMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def frees_twice(wire: Wire) -> None:
    give_back = wire._release_reads

    def twice(link: object, session: object, now: float) -> None:
        locked = list(session.locked)  # type: ignore[attr-defined]
        give_back(link, session, now)  # type: ignore[arg-type]
        session.locked = locked[:1]  # type: ignore[attr-defined]
        give_back(link, session, now)  # type: ignore[arg-type]

    wire._release_reads = twice  # type: ignore[method-assign]


def forgets_to_free(wire: Wire) -> None:
    def forget(link: object, session: object, now: float) -> None:
        session.locked, session.reading = [], None  # type: ignore[attr-defined]

    wire._release_reads = forget  # type: ignore[method-assign]


@pytest.mark.parametrize("mistake", [frees_twice, forgets_to_free])
def test_the_machine_catches_a_wire_that_releases_wrongly(mistake: Callable[[Wire], None]) -> None:
    class Broken(WireMachine):
        @initialize(stored=st.just(OBJECTS))
        def begin(self, stored: int) -> None:
            super().begin(stored)
            mistake(self.wire)

    quick = settings(
        max_examples=200,
        stateful_step_count=30,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        derandomize=True,
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Broken, settings=quick)
