"""Whatever the server answers: a miss and a counted error, no slot outside the pool or on another, no lock left."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache_mp_safe.testing.fake_server import Call, FakeMaker, FakeServer, SharedMemory, reply_to
from lmcache_mp_safe.wire import (
    CallFailed,
    Committed,
    Connected,
    FailureKind,
    LookupAnswered,
    Reserved,
    Retrieved,
    SessionId,
    Wire,
    WireConfig,
    WireEvent,
)

OBJECT = 8192
POOL = 64 * OBJECT
DIGESTS = [bytes([n]) * 32 for n in range(4)]
Corrupt = Callable[[Any], Any]


class Bench:
    """A wire on the model of the server; `corrupt` changes what one operation is answered with."""

    def __init__(self, memory: SharedMemory) -> None:
        self.now = 0.0
        self.server = FakeServer(lambda: self.now, memory, shm_name=memory.name)
        self.maker = FakeMaker(self.server, lambda: self._carry)
        self.corrupt: dict[str, Corrupt] = {}
        self.wire = Wire(WireConfig("tcp://nowhere", "ns", OBJECT), maker=self.maker)  # type: ignore[arg-type]
        self.wire.start(self.now)
        assert isinstance(self.poll()[0], Connected)

    def _carry(self, call: Call) -> None:
        reply = reply_to(call, self.server)
        if reply is not None:
            corrupt = self.corrupt.get(call.operation)
            try:
                call.answer(reply.value if corrupt is None else corrupt(reply.value))
            except ArithmeticError as error:  # what a client that cannot decode may put into a future
                call.answer(error)

    def poll(self) -> list[WireEvent]:
        events: list[WireEvent] = []
        for _ in range(6):
            self.now += 0.01
            events += self.wire.poll(self.now)
        return events

    def one(self) -> WireEvent:
        (event,) = self.poll()
        return event

    def store(self, session: SessionId) -> None:
        self.wire.reserve(session, 0, 4, self.now)
        reserved = self.one()
        assert isinstance(reserved, Reserved)
        self.wire.commit(session, reserved.call, self.now)
        assert isinstance(self.one(), Committed)

    def looked_up(self) -> SessionId:
        session = self.wire.open(DIGESTS)
        self.wire.lookup(session, 4, self.now)
        found = self.one()
        assert isinstance(found, LookupAnswered)
        assert found.found == 4
        return session

    def check_settled(self) -> None:
        """Everything is given back and closed; nothing is left here or on the server."""
        self.corrupt = {}
        for session in list(self.wire._sessions.values()):
            for call in list(session.reservations):
                self.wire.give_back(call, self.now)
        self.wire.close_in_order(list(self.wire._sessions), self.now)
        self.poll()
        held = self.wire.held()
        assert (held.sessions, held.locks, held.retrieves, held.unanswered) == (0, 0, 0, 0)
        assert self.server.objects.locked(self.server.objects.readable) == []
        assert self.server.reads == self.server.writes == self.server.objects.reserved == {}
        assert self.server.lookups == {}
        assert self.server.sessions == {}
        assert self.wire.up


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    memory = SharedMemory(POOL)
    yield memory
    memory.close()


def with_slot(**changes: Any) -> Corrupt:
    """The first slot says something else."""

    def corrupt(answer: Any) -> Any:
        answer.context["slots"][0].update(changes)
        return answer

    return corrupt


def with_context(**changes: Any) -> Corrupt:
    def corrupt(answer: Any) -> Any:
        answer.context.update(changes)
        return answer

    return corrupt


def raised(answer: Any) -> Any:
    raise ArithmeticError("cannot be decoded")


def overlapping(answer: Any) -> Any:
    answer.context["slots"][0]["offset"] = answer.context["slots"][1]["offset"] + 4096
    return answer


WRONG: dict[str, Corrupt] = {
    "none": lambda answer: None,
    "a number": lambda answer: 7,
    "a text": lambda answer: "context",
    "an empty object": lambda answer: SimpleNamespace(),
    "an exception": raised,
    "no context": lambda answer: SimpleNamespace(success=True, context=None),
    "a list for a context": lambda answer: SimpleNamespace(success=True, context=[1]),
    "no slots": with_context(slots=[]),
    "slots of None": with_context(slots=None),
    "slots of text": with_context(slots="four"),
    "slots of numbers": with_context(slots=[1, 2, 3, 4]),
    "one slot too few": lambda answer: with_context(slots=answer.context["slots"][1:])(answer),
    "one slot too many": lambda answer: with_context(slots=answer.context["slots"] * 2)(answer),
    "a negative offset": with_slot(offset=-4096),
    "an offset at the end": with_slot(offset=POOL),
    "an offset with its end outside": with_slot(offset=POOL - 4096),
    "a huge offset": with_slot(offset=2**70),
    "an unaligned offset": with_slot(offset=40 * OBJECT + 8),
    "a bool for an offset": with_slot(offset=False),
    "a float for an offset": with_slot(offset=4096.0),
    "a text for an offset": with_slot(offset="0"),
    "no offset": with_slot(offset=None),
    "a shorter slot": with_slot(length=OBJECT - 4096),
    "a longer slot": with_slot(length=OBJECT + 4096),
    "a bool for a length": with_slot(length=True),
    "slots that overlap": overlapping,
}
WRONG_INDICES: dict[str, Corrupt] = {
    "no indices": with_context(chunk_indices=None),
    "indices out of range": with_context(chunk_indices=[0, 1, 2, 4]),
    "negative indices": with_context(chunk_indices=[-1, 0, 1, 2]),
    "indices twice": with_context(chunk_indices=[0, 0, 1, 2]),
    "bools for indices": with_context(chunk_indices=[False, True, 2, 3]),
    "too few indices": with_context(chunk_indices=[0]),
}
WRONG_SUCCESS: dict[str, Corrupt] = {
    f"success of {value!r}": (lambda answer, value=value: SimpleNamespace(success=value, context=answer.context))
    for value in (None, 1, 0, "", "yes", [])
}


@pytest.mark.parametrize("wrong", [*WRONG.items(), *WRONG_INDICES.items()], ids=lambda wrong: wrong[0])
def test_a_reservation_that_makes_no_sense_is_a_counted_failure(memory: SharedMemory, wrong: Any) -> None:
    bench = Bench(memory)
    bench.corrupt["prepare_store"] = wrong[1]
    session = bench.wire.open(DIGESTS)
    bench.wire.reserve(session, 0, 4, bench.now)
    failed(bench)
    bench.check_settled()


@pytest.mark.parametrize("wrong", [*WRONG.items(), *WRONG_SUCCESS.items()], ids=lambda wrong: wrong[0])
def test_a_retrieve_that_makes_no_sense_is_a_counted_failure_and_leaves_no_lock(
    memory: SharedMemory, wrong: Any
) -> None:
    bench = Bench(memory)
    bench.store(bench.wire.open(DIGESTS))
    session = bench.looked_up()
    bench.corrupt["prepare_retrieve"] = wrong[1]
    bench.wire.retrieve(session, 0, 4, bench.now)
    failed(bench)
    bench.check_settled()


@pytest.mark.parametrize("answer", [-1, 5, 2**70, True, 3.0, "4", [4], b"", {}], ids=repr)
def test_a_lookup_that_makes_no_sense_is_a_counted_failure_and_leaves_no_lock(
    memory: SharedMemory, answer: Any
) -> None:
    bench = Bench(memory)
    bench.store(bench.wire.open(DIGESTS))
    bench.corrupt["query_prefetch_status"] = lambda found: answer
    bench.wire.lookup(bench.wire.open(DIGESTS), 4, bench.now)
    failed(bench)
    bench.check_settled()


@pytest.mark.parametrize("answer", [None, 1, 0, "True", [], 2**70], ids=repr)
def test_a_commit_that_is_answered_by_neither_yes_nor_no_is_a_counted_failure(
    memory: SharedMemory, answer: Any
) -> None:
    bench = Bench(memory)
    session = bench.wire.open(DIGESTS)
    bench.wire.reserve(session, 0, 4, bench.now)
    reserved = bench.one()
    assert isinstance(reserved, Reserved)
    bench.corrupt["commit_store"] = lambda accepted: answer
    bench.wire.commit(session, reserved.call, bench.now)
    failed(bench)
    bench.check_settled()


def failed(bench: Bench) -> None:
    event = bench.one()
    assert isinstance(event, CallFailed), event
    assert event.kind in (FailureKind.MALFORMED, FailureKind.REFUSED)
    assert bench.wire._tally.totals[f"call_failed:{event.kind.value}"] == 1


# --- slots in use ---------------------------------------------------------------------------------------------------


def handed_out(bench: Bench, session: SessionId, start: int, end: int) -> Reserved:
    bench.wire.reserve(session, start, end, bench.now)
    event = bench.one()
    assert isinstance(event, Reserved)
    return event


@pytest.mark.parametrize("shift", [-4096, 0, 4096])
def test_a_slot_that_another_reservation_is_writing_is_not_handed_out_again(memory: SharedMemory, shift: int) -> None:
    bench = Bench(memory)
    session = bench.wire.open(DIGESTS)
    before = handed_out(bench, session, 0, 2)
    bench.corrupt["prepare_store"] = with_slot(offset=before.offsets[1] + shift)
    bench.wire.reserve(session, 2, 3, bench.now)
    failed(bench)
    bench.check_settled()


def test_a_slot_of_a_closed_session_is_in_use_until_its_lease_is_over(memory: SharedMemory) -> None:
    bench = Bench(memory)
    first = bench.wire.open(DIGESTS)
    offset = handed_out(bench, first, 0, 1).offsets[0]
    bench.wire.close(first, bench.now)
    bench.poll()
    session = bench.wire.open(DIGESTS)
    bench.corrupt["prepare_store"] = with_slot(offset=offset)
    bench.wire.reserve(session, 1, 2, bench.now)
    failed(bench)
    bench.now += WireConfig("", "", OBJECT).lease_s
    assert handed_out(bench, session, 2, 3).offsets == {2: offset}


def test_a_slot_that_is_read_is_not_handed_out_to_write(memory: SharedMemory) -> None:
    bench = Bench(memory)
    bench.store(bench.wire.open([*DIGESTS[:3], b"x" * 32]))
    bench.store(bench.wire.open(DIGESTS))
    session = bench.looked_up()
    bench.wire.retrieve(session, 0, 2, bench.now)
    reading = bench.one()
    assert isinstance(reading, Retrieved)
    other = bench.wire.open([b"y" * 32])
    bench.corrupt["prepare_store"] = with_slot(offset=reading.offsets[0])
    bench.wire.reserve(other, 0, 1, bench.now)
    failed(bench)
    bench.wire.done_reading(session, bench.now)
    bench.check_settled()


def test_a_slot_that_is_written_is_not_handed_out_to_read(memory: SharedMemory) -> None:
    bench = Bench(memory)
    bench.store(bench.wire.open(DIGESTS))
    session = bench.looked_up()
    writing = handed_out(bench, bench.wire.open([b"y" * 32]), 0, 1)
    bench.corrupt["prepare_retrieve"] = with_slot(offset=writing.offsets[0])
    bench.wire.retrieve(session, 0, 4, bench.now)
    failed(bench)
    bench.check_settled()


def test_a_committed_slot_may_be_handed_out_again(memory: SharedMemory) -> None:
    bench = Bench(memory)
    bench.store(bench.wire.open(DIGESTS))
    bench.server.clear(force=True)
    bench.store(bench.wire.open(DIGESTS))
    bench.check_settled()


# --- the pool -------------------------------------------------------------------------------------------------------


def test_a_segment_that_is_truncated_ends_the_epoch_and_reading_it_is_an_error(memory: SharedMemory) -> None:
    bench = Bench(memory)
    pool = bench.wire.pool
    assert pool is not None
    os.truncate(memory.path, 4096)
    with pytest.raises(Exception, match="truncated"):
        pool.read(8192, 128)
    bench.wire.reserve(bench.wire.open(DIGESTS), 0, 1, bench.now)
    bench.poll()
    assert not bench.wire.up


@pytest.mark.parametrize("name", ["../../etc/passwd", "/../x", "a/b", "..", ".", "a\0b", 7, None, b"x"], ids=repr)
@pytest.mark.parametrize("size", [POOL])
def test_a_pool_outside_of_shared_memory_is_never_opened(memory: SharedMemory, name: Any, size: int) -> None:
    refused(memory, name, size)


@pytest.mark.parametrize("size", [True, -1, 1.5, "big", None, 2**70], ids=repr)
def test_a_pool_of_an_impossible_size_is_refused(memory: SharedMemory, size: Any) -> None:
    refused(memory, memory.name, size)


def refused(memory: SharedMemory, name: Any, size: Any) -> None:
    server = FakeServer(lambda: 0.0, memory, shm_name=memory.name)
    server.register_kv_cache_engine_driven_context = lambda payload: SimpleNamespace(  # type: ignore[method-assign]
        shm_name=name, pool_size=size
    )
    maker = FakeMaker(server)
    wire = Wire(WireConfig("tcp://nowhere", "ns", OBJECT), maker=maker)  # type: ignore[arg-type]
    wire.start(0.0)
    assert wire.poll(0.0) == []
    assert not wire.up
    assert wire.has_tried
    assert maker.clients == []


# --- anything -------------------------------------------------------------------------------------------------------

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
slots = st.lists(
    st.fixed_dictionaries(
        {
            "offset": st.integers(-2, 66).map(lambda n: n * 4096) | values,
            "length": st.just(OBJECT) | values,
        }
    )
    | values,
    max_size=5,
)
answers = values | st.builds(
    lambda success, context: SimpleNamespace(success=success, context=context),
    st.booleans() | values,
    st.fixed_dictionaries({"slots": slots | values, "chunk_indices": st.lists(st.integers(-1, 5), max_size=5) | values})
    | values,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(reserving=answers, retrieving=answers, found=values, committing=values)
def test_no_answer_whatever_leads_outside_of_the_pool_or_leaves_a_lock(
    memory: SharedMemory, reserving: Any, retrieving: Any, found: Any, committing: Any
) -> None:
    bench = Bench(memory)
    bench.store(bench.wire.open(DIGESTS))
    session = bench.looked_up()
    bench.corrupt = {
        "prepare_store": lambda answer: reserving,
        "prepare_retrieve": lambda answer: retrieving,
        "commit_store": lambda answer: committing,
        "query_prefetch_status": lambda answer: 0 if found is None else found,
    }
    bench.wire.retrieve(session, 0, 4, bench.now)
    bench.wire.lookup(bench.wire.open(DIGESTS), 4, bench.now)
    writer = bench.wire.open([bytes([n]) * 32 for n in range(10, 14)])
    bench.wire.reserve(writer, 0, 4, bench.now)
    events = bench.poll()
    assert len(events) == 3
    given_out: list[int] = []
    for event in events:
        if isinstance(event, Reserved):
            given_out += event.offsets.values()
            assert set(event.offsets) <= {0, 1, 2, 3}
            bench.wire.commit(writer, event.call, bench.now)
        elif isinstance(event, Retrieved):
            assert len(event.offsets) == 4
            given_out += event.offsets
    assert all(type(offset) is int and 0 <= offset <= POOL - OBJECT and offset % 4096 == 0 for offset in given_out)
    assert all(after - before >= OBJECT for before, after in itertools.pairwise(sorted(given_out)))
    bench.poll()
    if retrieving_says_no(retrieving):
        # A server that says no and has the locks all the same is out of reach: they run out.
        return
    if found is None or (type(found) is int and 0 <= found < 4):
        return  # so is one that locks more than it says
    if any(isinstance(event, Reserved) and not event.offsets for event in events):
        return  # or grants slots and says that there are none
    bench.check_settled()


def retrieving_says_no(answer: Any) -> bool:
    return getattr(answer, "success", None) is False
