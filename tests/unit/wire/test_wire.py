"""The wire layer against a client that answers when the test says so."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache_mp_safe.errors import LocalError
from lmcache_mp_safe.ids import ServerEpoch
from lmcache_mp_safe.metrics.tally import Sample
from lmcache_mp_safe.testing.fake_client import FakeAnswer, FakeCall, FakeClient, FakeMaker, ServerModel, slots
from lmcache_mp_safe.wire import (
    CallFailed,
    CallId,
    Committed,
    Connected,
    FailureKind,
    LookupAnswered,
    Lost,
    Reserved,
    Retrieved,
    SessionId,
    Wire,
    WireConfig,
    WireEvent,
)
from lmcache_mp_safe.wire.tokens import plain_tokens

OBJECT = 8192
POOL = 64 * OBJECT
CHUNK = 256
DIGESTS = [bytes([n]) * 32 for n in range(8)]
CONFIG = WireConfig("tcp://127.0.0.1:1", "ns", OBJECT)


class Bench:
    """A wire, its client, a clock, and everything that came out."""

    def __init__(self, segment: Path, config: WireConfig = CONFIG) -> None:
        self.segment = segment
        self.maker = FakeMaker(segment.name, POOL)
        self.wire = Wire(config, maker=self.maker)  # type: ignore[arg-type]
        self.now = 0.0
        self.events: list[WireEvent] = []
        self.wire.start(self.now)
        self.poll()

    @property
    def client(self) -> FakeClient:
        return self.maker.client

    def poll(self) -> list[WireEvent]:
        events = self.wire.poll(self.now)
        self.events += events
        return events

    def after(self, seconds: float) -> list[WireEvent]:
        self.now += seconds
        return self.poll()

    def answer(self, name: str, value: Any) -> list[WireEvent]:
        self.client.waiting(name).answer(value)
        return self.poll()

    def looked_up(self, found: int = 4, objects: int = 6) -> SessionId:
        session = self.wire.open(DIGESTS)
        self.wire.lookup(session, objects, self.now)
        self.answer("lookup", None)
        self.answer("status", found)
        return session

    def reading(self, start: int = 1, end: int = 3) -> SessionId:
        session = self.looked_up()
        self.wire.retrieve(session, start, end, self.now)
        self.answer("retrieve", slots([OBJECT * i for i in range(start, end)], OBJECT))
        return session

    def settle(self) -> None:
        """Answer everything that only gives back."""
        for _ in range(4):
            for call in self.client.open_calls:
                if call.name in ("free", "done", "end"):
                    call.answer(True if call.name == "done" else None)
            self.poll()

    def names(self) -> list[str]:
        return [call.name for call in self.client.calls if call.name != "register"]

    def held_anything(self) -> bool:
        held = self.wire.held()
        return any((held.sessions, held.locks, held.retrieves, held.unanswered))


@pytest.fixture
def segment() -> Iterator[Path]:
    path = Path("/dev/shm") / f"lmcache_mp_safe_wire_{uuid.uuid4().hex}"
    path.touch(mode=0o600)
    os.truncate(path, POOL)
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def bench(segment: Path) -> Iterator[Bench]:
    made = Bench(segment)
    yield made
    made.wire.shutdown(0.0)


def reserved(bench: Bench) -> tuple[SessionId, CallId]:
    """A session with one granted slot, and the call that asked for it."""
    session = bench.wire.open(DIGESTS)
    call = bench.wire.reserve(session, 0, 1, bench.now)
    bench.answer("reserve", slots([0], OBJECT, [0]))
    return session, call


def spans(calls: list[FakeCall]) -> list[tuple[int, int]]:
    return [(call.arguments[0].start // CHUNK, call.arguments[0].end // CHUNK) for call in calls]


# --- answers that come in time --------------------------------------------------------------------------------------


def test_nothing_is_sent_before_start(segment: Path) -> None:
    maker = FakeMaker(segment.name, POOL)
    wire = Wire(CONFIG, maker=maker)  # type: ignore[arg-type]
    assert not wire.up
    assert maker.clients == []


def test_connected_names_the_segment_that_was_opened(bench: Bench, segment: Path) -> None:
    (event,) = bench.events
    assert isinstance(event, Connected)
    assert (event.segment.name, event.segment.inode) == (segment.name, segment.stat().st_ino)
    assert bench.wire.up
    assert bench.wire.segment == event.segment


def test_lookup_asks_for_the_status_only_after_it_was_acknowledged(bench: Bench) -> None:
    call = bench.wire.lookup(session := bench.wire.open(DIGESTS), 6, bench.now)
    bench.poll()
    assert bench.names() == ["lookup"]
    bench.answer("lookup", None)
    assert bench.answer("status", 4) == [LookupAnswered(call, session, 4)]
    assert bench.wire.held().locks == 4


def test_a_lookup_that_still_runs_is_asked_again_but_not_in_every_poll(bench: Bench) -> None:
    bench.wire.lookup(bench.wire.open(DIGESTS), 6, bench.now)
    bench.answer("lookup", None)
    bench.answer("status", None)
    for _ in range(5):
        bench.poll()
    assert bench.names().count("status") == 1
    bench.after(0.2)
    assert bench.names().count("status") == 2


def test_store_call_and_commit_use_the_same_key_and_two_of_one_range_do_not(bench: Bench) -> None:
    session = bench.wire.open(DIGESTS)
    first, _ = (bench.wire.reserve(session, 0, 2, bench.now) for _ in range(2))
    one, two = bench.client.sent("reserve")
    one.answer(slots([0, OBJECT], OBJECT, [0, 1]))
    two.answer(slots([], OBJECT, []))
    bench.poll()
    bench.wire.commit(session, first, bench.now)
    assert bench.client.waiting("commit").arguments[0] == one.arguments[0]
    assert one.arguments[0] != two.arguments[0]
    mine, other = (plain_tokens(call.arguments[0].token_ids) for call in (one, two))
    assert mine[: 2 * CHUNK] == other[: 2 * CHUNK]
    assert len(mine) < 3 * CHUNK


def test_reserved_offsets_are_named_by_object_and_absent_ones_are_absent(bench: Bench) -> None:
    session = bench.wire.open(DIGESTS)
    call = bench.wire.reserve(session, 2, 5, bench.now)
    (event,) = bench.answer("reserve", slots([OBJECT, 3 * OBJECT], OBJECT, [0, 2]))
    assert event == Reserved(call, session, 2, {2: OBJECT, 4: 3 * OBJECT}, bench.now + CONFIG.lease_s)


def test_the_lease_counts_from_the_call_and_not_from_its_answer(bench: Bench) -> None:
    session = bench.wire.open(DIGESTS)
    bench.wire.reserve(session, 0, 1, bench.now)
    bench.now += 5.0
    (event,) = bench.answer("reserve", slots([0], OBJECT, [0]))
    assert isinstance(event, Reserved)
    assert event.lease_until == CONFIG.lease_s


def test_commit_after_the_lease_is_refused_here(bench: Bench) -> None:
    session, call = reserved(bench)
    bench.now += CONFIG.lease_s + 1
    with pytest.raises(LocalError):
        bench.wire.commit(session, call, bench.now)
    assert "commit" not in bench.names()


@pytest.mark.parametrize("accepted", [True, False])
def test_committed_says_what_the_server_said(bench: Bench, accepted: bool) -> None:
    session, reserve = reserved(bench)
    call = bench.wire.commit(session, reserve, bench.now)
    assert bench.answer("commit", accepted) == [Committed(call, session, accepted)]


def test_retrieve_answers_one_offset_an_object(bench: Bench) -> None:
    session = bench.looked_up()
    call = bench.wire.retrieve(session, 1, 3, bench.now)
    offsets = (4 * OBJECT, 2 * OBJECT)
    assert bench.answer("retrieve", slots(offsets, OBJECT)) == [Retrieved(call, session, offsets)]


def test_a_second_retrieve_beside_an_open_one_is_a_local_error(bench: Bench) -> None:
    session = bench.reading()
    with pytest.raises(LocalError):
        bench.wire.retrieve(session, 3, 4, bench.now)


@pytest.mark.parametrize(("start", "end"), [(3, 5), (4, 6)])
def test_retrieve_and_free_of_locks_that_are_not_held_are_local_errors(bench: Bench, start: int, end: int) -> None:
    session = bench.looked_up(found=4)
    with pytest.raises(LocalError):
        bench.wire.retrieve(session, start, end, bench.now)
    with pytest.raises(LocalError):
        bench.wire.free(session, start, end, bench.now)


def test_free_of_an_empty_range_sends_nothing(bench: Bench) -> None:
    session = bench.looked_up()
    bench.wire.free(session, 2, 2, bench.now)
    assert "free" not in bench.names()


# --- closing, from every state --------------------------------------------------------------------------------------


def test_close_of_an_unused_session_sends_nothing(bench: Bench) -> None:
    bench.wire.close(bench.wire.open(DIGESTS), bench.now)
    bench.poll()
    assert bench.names() == []
    assert not bench.held_anything()


def test_close_during_a_lookup_waits_for_its_status_then_frees_then_ends(bench: Bench) -> None:
    session = bench.wire.open(DIGESTS)
    bench.wire.lookup(session, 6, bench.now)
    bench.wire.close(session, bench.now)
    bench.poll()
    assert bench.names() == ["lookup"]
    bench.answer("lookup", None)
    assert bench.answer("status", 4) == []
    assert spans(bench.client.sent("free")) == [(0, 4)]
    assert "end" not in bench.names()
    bench.answer("free", None)
    assert bench.names()[-1] == "end"
    bench.settle()
    assert not bench.held_anything()


def test_close_while_holding_frees_what_was_not_freed_already(bench: Bench) -> None:
    session = bench.looked_up(found=4)
    bench.wire.free(session, 1, 2, bench.now)
    bench.wire.close(session, bench.now)
    bench.settle()
    assert sorted(spans(bench.client.sent("free"))) == [(0, 1), (1, 2), (2, 4)]
    assert not bench.held_anything()


def test_close_while_reading_ends_the_retrieve_with_its_own_key(bench: Bench) -> None:
    session = bench.reading(1, 3)
    bench.wire.close(session, bench.now)
    bench.settle()
    assert [c.arguments for c in bench.client.sent("done")] == [c.arguments for c in bench.client.sent("retrieve")]
    assert sorted(spans(bench.client.sent("free"))) == [(0, 1), (3, 4)]
    assert bench.names()[-1] == "end"
    assert not bench.held_anything()


def test_close_during_a_retrieve_ends_it_when_it_has_succeeded(bench: Bench) -> None:
    session = bench.looked_up(found=4)
    bench.wire.retrieve(session, 0, 4, bench.now)
    bench.wire.close(session, bench.now)
    bench.poll()
    assert "done" not in bench.names()
    assert bench.answer("retrieve", slots([0, OBJECT, 2 * OBJECT, 3 * OBJECT], OBJECT)) == []
    bench.settle()
    assert bench.names()[-2:] == ["done", "end"]


def test_close_during_a_retrieve_that_fails_neither_commits_nor_frees_its_locks(bench: Bench) -> None:
    session = bench.looked_up(found=4)
    bench.wire.retrieve(session, 0, 4, bench.now)
    bench.wire.close(session, bench.now)
    bench.answer("retrieve", FakeAnswer(success=False))
    bench.settle()
    assert not {"done", "free"} & set(bench.names())
    assert not bench.held_anything()


def closed_with_a_reservation(bench: Bench) -> CallId:
    session, call = reserved(bench)
    bench.wire.close(session, bench.now)
    bench.settle()
    return call


def test_session_ends_only_when_nobody_writes_into_its_slots_and_they_are_given_back(bench: Bench) -> None:
    call = closed_with_a_reservation(bench)
    assert bench.names() == ["reserve"]
    bench.wire.give_back(call, bench.now)
    assert bench.client.waiting("commit").arguments == bench.client.sent("reserve")[0].arguments
    bench.answer("commit", True)
    bench.settle()
    assert bench.names() == ["reserve", "commit", "end"]
    assert not bench.held_anything()


def test_slots_that_may_have_no_memory_are_never_published(bench: Bench) -> None:
    bench.wire.leave(closed_with_a_reservation(bench))
    bench.settle()
    assert bench.names() == ["reserve", "end"]
    bench.wire.shutdown(0.0)
    assert "unregister" not in bench.names(), "which publishes"


def test_slots_that_the_server_may_have_given_to_the_next_writer_are_not_published(bench: Bench) -> None:
    call = closed_with_a_reservation(bench)
    bench.now += CONFIG.write_time_s + 1
    bench.wire.give_back(call, bench.now)
    bench.poll()
    assert "commit" not in bench.names()
    assert "end" in bench.names()


def test_what_was_committed_is_not_given_back_again(bench: Bench) -> None:
    session, call = reserved(bench)
    bench.wire.commit(session, call, bench.now)
    bench.wire.give_back(call, bench.now)
    assert bench.names().count("commit") == 1


def test_close_waits_for_a_commit_before_it_ends(bench: Bench) -> None:
    session, reserve = reserved(bench)
    bench.wire.commit(session, reserve, bench.now)
    bench.wire.close(session, bench.now)
    bench.poll()
    assert "end" not in bench.names()
    assert bench.answer("commit", True) == []
    assert bench.names()[-1] == "end"


def test_close_twice_releases_once(bench: Bench) -> None:
    session = bench.reading()
    for _ in range(2):
        bench.wire.close(session, bench.now)
        bench.settle()
    assert [bench.names().count(name) for name in ("done", "free", "end")] == [1, 2, 1]


def test_done_reading_twice_or_without_a_retrieve_releases_once(bench: Bench) -> None:
    session = bench.reading()
    bench.wire.done_reading(session, bench.now)
    bench.wire.done_reading(session, bench.now)
    other = bench.wire.open(DIGESTS)
    bench.wire.done_reading(other, bench.now)
    assert bench.names().count("done") == 1


def test_close_in_order_ends_in_that_order_even_when_the_first_settles_last(bench: Bench) -> None:
    boundary, chunks = bench.wire.open(DIGESTS[:1]), bench.wire.open(DIGESTS)
    bench.wire.lookup(boundary, 1, bench.now)
    bench.wire.lookup(chunks, 6, bench.now)
    first, second = bench.client.sent("lookup")
    bench.wire.close_in_order([boundary, chunks], bench.now)
    second.answer(None)
    bench.poll()
    bench.answer("status", 0)
    assert "end" not in bench.names()
    first.answer(None)
    bench.poll()
    bench.answer("status", 0)
    bench.settle()
    ends = [call.arguments[0] for call in bench.client.sent("end")]
    assert ends == [first.arguments[0].request_id, second.arguments[0].request_id]


def test_no_two_sessions_share_a_server_session(segment: Path) -> None:
    names = set()
    for _ in range(2):
        bench = Bench(segment)
        for _ in range(3):
            bench.wire.lookup(bench.wire.open(DIGESTS), 1, bench.now)
        names |= {call.arguments[0].request_id for call in bench.client.sent("lookup")}
    assert len(names) == 6


# --- late and lost --------------------------------------------------------------------------------------------------


def test_a_lookup_that_is_answered_late_frees_its_locks_and_is_a_miss(bench: Bench) -> None:
    session = bench.wire.open(DIGESTS)
    call = bench.wire.lookup(session, 6, bench.now)
    (failed,) = bench.after(CONFIG.lookup_timeout_s + 0.1)
    assert failed == CallFailed(call, session, FailureKind.TIMEOUT, failed.detail)  # type: ignore[union-attr]
    bench.answer("lookup", None)
    assert bench.answer("status", 4) == []
    assert spans(bench.client.sent("free")) == [(0, 4)]
    bench.wire.close(session, bench.now)
    bench.settle()
    bench.answer("register", bench.maker.registered())
    assert not bench.held_anything()


def test_a_lookup_whose_answer_is_lost_is_asked_about_before_it_is_given_up(bench: Bench) -> None:
    """The server keeps a lookup, and its locks, until somebody asks for its status."""
    session = bench.wire.open(DIGESTS)
    bench.wire.lookup(session, 6, bench.now)
    bench.after(CONFIG.lookup_timeout_s + 0.1)
    bench.wire.close(session, bench.now)
    bench.poll()
    bench.answer("register", bench.maker.registered())
    bench.after(61.0)
    assert bench.answer("status", 4) == []
    assert spans(bench.client.sent("free")) == [(0, 4)]
    bench.settle()
    assert "end" in bench.names()


def test_a_lookup_is_not_given_up_before_an_engine_that_was_idle_has_heard_its_status(bench: Bench) -> None:
    session = bench.wire.open(DIGESTS)
    bench.wire.lookup(session, 6, bench.now)
    bench.wire.close(session, bench.now)
    bench.client.waiting("lookup").answer(None)
    bench.after(1000.0)
    bench.poll()
    bench.answer("register", bench.maker.registered())
    bench.answer("status", 4)
    bench.settle()
    assert bench.client.sent("end")
    assert not bench.held_anything()


def test_a_lookup_is_not_ended_while_its_status_is_unknown(bench: Bench) -> None:
    session = bench.wire.open(DIGESTS)
    bench.wire.lookup(session, 6, bench.now)
    bench.after(CONFIG.lookup_timeout_s + 0.1)
    bench.wire.close(session, bench.now)
    bench.after(1.0)
    assert "end" not in bench.names()
    bench.answer("lookup", None)
    bench.answer("status", 2)
    bench.settle()
    assert bench.names()[-2:] == ["free", "end"]


def test_a_retrieve_that_succeeds_late_is_ended_by_itself(bench: Bench) -> None:
    session = bench.looked_up(found=2)
    bench.wire.retrieve(session, 0, 2, bench.now)
    (failed,) = bench.after(CONFIG.call_timeout_s + 0.1)
    assert isinstance(failed, CallFailed)
    bench.wire.close(session, bench.now)
    assert bench.answer("retrieve", slots([0, OBJECT], OBJECT)) == []
    assert bench.names().count("done") == 1
    assert "free" not in bench.names()


def test_a_retrieve_that_fails_late_or_never_answers_releases_nothing(bench: Bench) -> None:
    session = bench.looked_up(found=2)
    bench.wire.retrieve(session, 0, 2, bench.now)
    bench.after(CONFIG.call_timeout_s + 0.1)
    bench.wire.close(session, bench.now)
    bench.answer("retrieve", FakeAnswer(success=False))
    bench.settle()
    assert not {"done", "free"} & set(bench.names())


def test_a_reservation_that_comes_late_is_given_back_by_itself(bench: Bench) -> None:
    session = bench.wire.open(DIGESTS)
    call = bench.wire.reserve(session, 0, 1, bench.now)
    bench.after(CONFIG.call_timeout_s + 0.1)
    assert bench.answer("reserve", slots([0], OBJECT, [0])) == []
    assert bench.client.waiting("commit").arguments == bench.client.sent("reserve")[0].arguments
    commit = bench.wire.commit(session, call, bench.now)
    (failed,) = bench.poll()
    assert isinstance(failed, CallFailed)
    assert failed.call == commit
    assert bench.names().count("commit") == 1


def test_a_timeout_is_told_once(bench: Bench) -> None:
    session = bench.wire.open(DIGESTS)
    bench.wire.lookup(session, 6, bench.now)
    assert len(bench.after(CONFIG.lookup_timeout_s + 0.1)) == 1
    assert bench.after(1.0) == []


def test_a_timeout_asks_for_a_heartbeat_at_once(bench: Bench) -> None:
    bench.wire.lookup(bench.wire.open(DIGESTS), 6, bench.now)
    bench.poll()
    assert bench.client.sent("register") == []
    bench.after(CONFIG.lookup_timeout_s + 0.1)
    bench.poll()
    assert len(bench.client.sent("register")) == 1


def test_a_heartbeat_goes_out_once_an_interval_and_not_more_often(bench: Bench) -> None:
    for _ in range(5):
        bench.after(0.1)
    assert bench.client.sent("register") == []
    bench.after(CONFIG.heartbeat_s)
    bench.after(0.1)
    assert len(bench.client.sent("register")) == 1
    bench.answer("register", bench.maker.registered())
    assert bench.wire.up


@pytest.mark.parametrize("wrong", [FakeAnswer(shm_name="other", pool_size=POOL), FakeAnswer(), ValueError("no")])
def test_a_heartbeat_answered_by_another_server_ends_the_epoch(bench: Bench, wrong: Any) -> None:
    bench.after(CONFIG.heartbeat_s)
    events = bench.answer("register", wrong)
    assert any(isinstance(event, Lost) for event in events)


def test_an_unlinked_segment_ends_the_epoch_within_one_interval(bench: Bench, segment: Path) -> None:
    session = bench.looked_up()
    segment.unlink()
    events = bench.after(CONFIG.heartbeat_s)
    assert any(isinstance(event, Lost) for event in events)
    assert not bench.held_anything()
    sent = list(bench.client.calls)
    bench.wire.close(session, bench.now)
    assert bench.client.calls == sent


def test_lookup_that_reached_the_server_after_a_restart_is_asked_about_and_ended(bench: Bench, segment: Path) -> None:
    """The socket reconnects by itself: the new server has carried it out before its pool is seen to be another one."""
    session = bench.wire.open(DIGESTS)
    bench.wire.lookup(session, 6, bench.now)
    name = bench.client.waiting("lookup").arguments[0].request_id
    segment.unlink()
    segment.touch(mode=0o600)
    os.truncate(segment, POOL)
    bench.after(CONFIG.heartbeat_s)
    bench.after(1.0)
    bench.after(1.0)
    assert bench.client.waiting("status").arguments == (name,)
    bench.answer("status", 4)
    assert spans(bench.client.sent("free")) == [(0, 6)]  # the server frees no more than it noted
    bench.settle()
    assert bench.client.sent("end")[-1].arguments == (name,)
    assert not bench.client.sent("done")


def test_a_replaced_segment_ends_the_epoch_and_the_next_one_names_the_new_inode(bench: Bench, segment: Path) -> None:
    old = bench.wire.segment
    replacement = segment.with_name(segment.name + "_new")
    replacement.touch(mode=0o600)
    os.truncate(replacement, POOL)
    replacement.rename(segment)
    bench.after(CONFIG.heartbeat_s)
    bench.after(1.0)
    bench.after(1.0)
    assert old is not None
    assert bench.wire.segment is not None
    assert bench.wire.segment.inode == segment.stat().st_ino != old.inode
    assert bench.wire.segment.epoch == old.epoch + 1
    assert len(bench.maker.clients) == 2
    assert bench.maker.clients[0].closed


# --- a server that stood still until it was given up ----------------------------------------------------------------


def served(bench: Bench, model: ServerModel, **options: Any) -> None:
    """Carry out everything the current client has sent, as often as that leads to new calls."""
    for _ in range(6):
        for call in bench.client.open_calls:
            model.serve(call, **options)
        bench.after(0.2)


def stand_still(bench: Bench, model: ServerModel, **options: Any) -> FakeClient:
    """The server answers nothing until it is given up, then carries out all it was sent, for nobody; and goes on."""
    old = bench.client
    bench.after(CONFIG.heartbeat_s)
    events = bench.after(CONFIG.call_timeout_s + 1)
    assert any(isinstance(event, Lost) for event in events)
    for call in old.open_calls:
        model.serve(call, **options)
    bench.after(0.1)
    bench.after(0.1)
    assert bench.client is not old
    return old


STATES = ("lookup", "status", "locks", "retrieve", "failed retrieve", "reading", "closing")


@pytest.mark.parametrize("state", STATES)
def test_what_was_owed_to_a_server_that_stood_still_is_settled_when_it_goes_on(bench: Bench, state: str) -> None:
    model = ServerModel(OBJECT, CHUNK, stored=4)
    session = bench.wire.open(DIGESTS)
    bench.wire.lookup(session, 6, bench.now)
    if state != "lookup":
        model.serve(bench.client.waiting("lookup"))
        bench.poll()
    if state not in ("lookup", "status"):
        served(bench, model)
    if state in ("retrieve", "failed retrieve", "reading", "closing"):
        bench.wire.retrieve(session, 0, 3, bench.now)
    if state in ("reading", "closing"):
        served(bench, model)
    if state == "closing":
        bench.wire.close(session, bench.now)
    stand_still(bench, model, fail_retrieve=state == "failed retrieve")
    served(bench, model)
    assert not bench.held_anything()
    model.check_settled()


def test_what_was_owed_to_a_server_that_died_is_not_said_to_the_next_one(bench: Bench, segment: Path) -> None:
    bench.reading()
    segment.unlink()
    segment.touch(mode=0o600)
    os.truncate(segment, POOL)
    bench.after(CONFIG.heartbeat_s)
    bench.after(1.0)
    bench.after(1.0)
    assert bench.wire.up
    assert bench.names() == []
    assert not bench.held_anything()


def test_locks_that_the_server_has_taken_back_meanwhile_are_not_released(bench: Bench) -> None:
    bench.looked_up()
    bench.now += CONFIG.lock_time_s
    model = ServerModel(OBJECT, CHUNK, stored=4)
    stand_still(bench, model)
    served(bench, model)
    assert bench.names() == ["end"]


def test_calls_while_down_fail_in_the_next_poll_and_raise_nothing(bench: Bench, segment: Path) -> None:
    segment.unlink()
    bench.after(CONFIG.heartbeat_s)
    session = bench.wire.open(DIGESTS)
    calls = [
        bench.wire.lookup(session, 1, bench.now),
        bench.wire.retrieve(session, 0, 1, bench.now),
        bench.wire.reserve(session, 0, 1, bench.now),
    ]
    failed = [e for e in bench.wire._events if isinstance(e, CallFailed)]
    assert [(f.call, f.kind) for f in failed] == [(call, FailureKind.LOST) for call in calls]
    bench.wire.free(session, 0, 1, bench.now)
    bench.wire.done_reading(session, bench.now)
    bench.wire.close(session, bench.now)


def test_epochs_count_from_the_configured_one(segment: Path) -> None:
    bench = Bench(segment, WireConfig("tcp://127.0.0.1:1", "ns", OBJECT, first_epoch=ServerEpoch(7)))
    assert bench.wire.epoch == 7


# --- malformed ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("found", [-1, 7, True, "4", 2.0])
def test_an_impossible_number_of_objects_is_malformed(bench: Bench, found: Any) -> None:
    bench.wire.lookup(bench.wire.open(DIGESTS), 6, bench.now)
    bench.answer("lookup", None)
    (failed,) = bench.answer("status", found)
    assert isinstance(failed, CallFailed)
    assert failed.kind is FailureKind.MALFORMED


BAD_SLOTS = {
    "before the pool": slots([-OBJECT, 0], OBJECT),
    "past the pool": slots([0, POOL - OBJECT + 4096], OBJECT),
    "overlapping": slots([0, 4096], OBJECT),
    "the same twice": slots([0, 0], OBJECT),
    "too few": slots([0], OBJECT),
    "too short": slots([0, OBJECT], OBJECT - 4096),
    "not a number": slots(["0", OBJECT], OBJECT),  # type: ignore[list-item]
    "no slots": FakeAnswer({}),
    "no mapping": FakeAnswer([1, 2]),
}


@pytest.mark.parametrize("answer", BAD_SLOTS.values(), ids=BAD_SLOTS.keys())
def test_a_retrieve_with_impossible_slots_is_malformed_and_still_ended(bench: Bench, answer: FakeAnswer) -> None:
    session = bench.looked_up(found=2)
    bench.wire.retrieve(session, 0, 2, bench.now)
    (failed,) = bench.answer("retrieve", answer)
    assert isinstance(failed, CallFailed)
    assert failed.kind is FailureKind.MALFORMED
    bench.wire.close(session, bench.now)
    bench.settle()
    assert bench.names()[-2:] == ["done", "end"]


@pytest.mark.parametrize("indices", [[0, 0], [0, 2], [-1, 0], [0, True], [0], "01"])
def test_a_reservation_with_impossible_indices_is_malformed(bench: Bench, indices: Any) -> None:
    session = bench.wire.open(DIGESTS)
    bench.wire.reserve(session, 0, 2, bench.now)
    (failed,) = bench.answer("reserve", slots([0, OBJECT], OBJECT, indices))
    assert isinstance(failed, CallFailed)
    assert failed.kind is FailureKind.MALFORMED


def test_a_future_that_raises_is_a_failed_call_and_not_an_exception(bench: Bench) -> None:
    session = bench.wire.open(DIGESTS)
    call = bench.wire.reserve(session, 0, 1, bench.now)
    (failed,) = bench.answer("reserve", ValueError("operation does not match"))
    assert isinstance(failed, CallFailed)
    assert failed.call == call
    assert failed.kind in (FailureKind.REFUSED, FailureKind.MALFORMED)


# --- bounds ---------------------------------------------------------------------------------------------------------


def test_too_many_calls_without_an_answer_end_in_a_bypass_and_a_new_client(segment: Path) -> None:
    bench = Bench(segment, WireConfig("tcp://127.0.0.1:1", "ns", OBJECT, max_unanswered_calls=8))
    for _ in range(9):
        bench.wire.lookup(bench.wire.open(DIGESTS), 1, bench.now)
    bench.after(CONFIG.lookup_timeout_s + 0.1)
    bench.after(1.0)
    bench.after(1.0)
    assert len(bench.maker.clients) == 2
    assert bench.maker.clients[0].closed


def test_an_idle_poll_sends_nothing_and_says_nothing(bench: Bench) -> None:
    sessions = [bench.looked_up() for _ in range(5)]
    before = len(bench.client.calls)
    assert [bench.poll() for _ in range(10)] == [[]] * 10
    assert len(bench.client.calls) == before
    assert len(sessions) == bench.wire.held().sessions


# --- shutdown -------------------------------------------------------------------------------------------------------


def test_shutdown_gives_back_ends_and_unregisters(bench: Bench) -> None:
    bench.reading()
    bench.wire.shutdown(0.0)
    names = bench.names()
    assert names[-5:] == ["done", "free", "free", "end", "unregister"]
    assert bench.client.closed


def test_process_has_its_usual_turns_after_a_shutdown_that_gave_something_back(bench: Bench) -> None:
    """What is said in parting are calls, and nobody polls for their answers."""
    usual = sys.getswitchinterval()
    bench.reading()
    bench.wire.shutdown(0.0)
    assert "free" in bench.names()
    assert sys.getswitchinterval() == usual


def test_threads_take_short_turns_only_while_an_answer_is_awaited(bench: Bench) -> None:
    """Also for a store: an engine that asks whether it is over would keep the call from being sent."""
    usual = sys.getswitchinterval()
    bench.wire.reserve(bench.wire.open(DIGESTS), 0, 1, bench.now)
    assert sys.getswitchinterval() < usual
    bench.wire.poll(bench.now)
    assert sys.getswitchinterval() < usual
    bench.now += 1000
    bench.wire.poll(bench.now)
    assert sys.getswitchinterval() == usual, "its owner was told, and goes on without"


def test_shutdown_with_an_open_reservation_does_not_unregister(bench: Bench) -> None:
    session = bench.wire.open(DIGESTS)
    bench.wire.reserve(session, 0, 1, bench.now)
    bench.answer("reserve", slots([0], OBJECT, [0]))
    bench.wire.shutdown(0.0)
    assert "unregister" not in bench.names()


def test_shutdown_twice_is_one_shutdown(bench: Bench) -> None:
    bench.wire.shutdown(0.0)
    bench.wire.shutdown(0.0)
    assert bench.names() == ["unregister"]


# --- the detectors of the model itself ------------------------------------------------------------------------------


def test_the_server_model_notices_a_lock_that_is_released_twice() -> None:
    model = ServerModel(OBJECT, CHUNK, stored=1)
    model.locks["s", 0] = 1
    model._release([("s", 0)])
    with pytest.raises(AssertionError, match="released twice"):
        model._release([("s", 0)])


def test_the_server_model_notices_a_lock_that_is_left() -> None:
    model = ServerModel(OBJECT, CHUNK, stored=1)
    model.locks["s", 0] = 1
    with pytest.raises(AssertionError, match="locks left"):
        model.check_settled()


# --- what is counted ------------------------------------------------------------------------------------------------


def sample_of(bench: Bench) -> Sample:
    return bench.wire._tally.take({}) or Sample()


def test_times_of_calls_run_from_their_sending_to_the_poll_that_found_the_answer(bench: Bench) -> None:
    session = bench.wire.open(DIGESTS)
    bench.wire.lookup(session, 6, bench.now)
    bench.answer("lookup", None)
    bench.now += 0.25
    bench.answer("status", 4)
    bench.wire.retrieve(session, 1, 3, bench.now)
    bench.now += 0.5
    bench.answer("retrieve", slots([OBJECT, 2 * OBJECT], OBJECT))
    assert sample_of(bench) == Sample(times={"call:lookup": [0.25], "call:retrieve": [0.5]})


@pytest.mark.parametrize("kind", FailureKind)
def test_every_failed_call_is_counted_once_by_its_kind(bench: Bench, kind: FailureKind) -> None:
    session = bench.wire.open(DIGESTS)
    bench.wire.reserve(session, 0, 2, bench.now)
    call = bench.client.waiting("reserve")
    match kind:
        case FailureKind.TIMEOUT:
            bench.after(CONFIG.call_timeout_s + 1)
            bench.after(1)
        case FailureKind.LOST:
            bench.wire._lose("gone", bench.now)
        case FailureKind.MALFORMED:
            call.answer(SimpleNamespace(context="nonsense"))
            bench.poll()
        case FailureKind.REFUSED:
            call.answer(RuntimeError("no"))
            bench.poll()
    failed = [event for event in bench.events if isinstance(event, CallFailed)]
    assert [event.kind for event in failed] in ([kind], [])
    assert sample_of(bench).sums == {f"call_failed:{kind.value}": 1}
