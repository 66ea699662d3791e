"""Bursts, lock ages, late grants and replaced segments: cases that once slipped through the wire layer."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_mp_safe.testing.fake_client import FakeClient, FakeMaker, slots
from lmcache_mp_safe.wire import Lost, Retrieved, Wire, WireConfig, WireEvent

OBJECT = 8192
POOL = 64 * OBJECT
DIGESTS = [bytes([n]) * 32 for n in range(8)]
SMALL_CAP = WireConfig("tcp://127.0.0.1:1", "ns", OBJECT, max_unanswered_calls=8)


@pytest.fixture
def segment() -> Iterator[Path]:
    path = Path("/dev/shm") / f"lmcache_mp_safe_wire_{uuid.uuid4().hex}"
    path.touch(mode=0o600)
    os.truncate(path, POOL)
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def maker(segment: Path) -> FakeMaker:
    return FakeMaker(segment.name, POOL)


@pytest.fixture
def wire(maker: FakeMaker) -> Iterator[Wire]:
    wire = Wire(SMALL_CAP, maker=maker)  # type: ignore[arg-type]
    wire.start(0.0)
    wire.poll(0.0)
    yield wire
    wire.shutdown(0.0)


def answer(wire: Wire, client: FakeClient, name: str, value: Any, now: float = 0.0) -> list[WireEvent]:
    client.waiting(name).answer(value)
    return wire.poll(now)


def test_a_burst_of_lookups_in_one_hook_does_not_end_the_epoch(wire: Wire, maker: FakeMaker) -> None:
    for _ in range(9):
        wire.lookup(wire.open(DIGESTS), 1, 0.0)
    for call in maker.client.open_calls:
        call.answer(None)
    events = wire.poll(0.0)
    assert not any(isinstance(event, Lost) for event in events)
    assert wire.up


def test_one_hook_never_queues_more_than_the_cap(wire: Wire, maker: FakeMaker) -> None:
    for _ in range(2000):  # LMCache's client thread blocks after about a thousand, for every client of the process
        wire.lookup(wire.open(DIGESTS), 1, 0.0)
    assert len(maker.client.calls) <= 2 * SMALL_CAP.max_unanswered_calls


def test_a_lookup_with_an_impossible_answer_frees_what_it_asked_for(wire: Wire, maker: FakeMaker) -> None:
    # Safe: the server frees what it noted for the session and no more.
    session = wire.open(DIGESTS)
    wire.lookup(session, 6, 0.0)
    answer(wire, maker.client, "lookup", None)
    answer(wire, maker.client, "status", 7)
    wire.close(session, 0.0)
    assert maker.client.sent("free")


def test_shutdown_does_not_publish_the_slots_of_a_session_that_was_closed(wire: Wire, maker: FakeMaker) -> None:
    session = wire.open(DIGESTS)
    wire.reserve(session, 0, 1, 0.0)
    answer(wire, maker.client, "reserve", slots([0], OBJECT, [0]))
    wire.close(session, 0.0)
    wire.shutdown(0.0)
    assert maker.client.sent("unregister") == []


def test_slots_that_were_granted_late_are_given_back_before_a_shutdown_unregisters(
    wire: Wire, maker: FakeMaker
) -> None:
    session = wire.open(DIGESTS)
    wire.reserve(session, 0, 1, 0.0)
    late = SMALL_CAP.call_timeout_s + 0.1
    wire.poll(late)
    answer(wire, maker.client, "reserve", slots([0], OBJECT, [0]), late)
    wire.shutdown(0.0)
    names = [call.name for call in maker.client.calls]
    assert names.index("commit") < names.index("unregister")


def test_locks_older_than_the_servers_ttl_are_not_released(wire: Wire, maker: FakeMaker) -> None:
    # They are gone, and the server's count is anonymous: the release would take another reader's.
    session = wire.open(DIGESTS)
    wire.lookup(session, 6, 0.0)
    answer(wire, maker.client, "lookup", None)
    answer(wire, maker.client, "status", 4)
    wire.close(session, 301.0)
    assert maker.client.sent("free") == []


def test_no_offset_is_handed_out_after_the_segment_was_replaced(wire: Wire, maker: FakeMaker, segment: Path) -> None:
    session = wire.open(DIGESTS)
    wire.lookup(session, 6, 0.0)
    answer(wire, maker.client, "lookup", None)
    answer(wire, maker.client, "status", 4)
    wire.retrieve(session, 0, 1, 0.0)
    segment.unlink()
    events = answer(wire, maker.client, "retrieve", slots([0], OBJECT))
    assert not any(isinstance(event, Retrieved) for event in events)


def test_shutdown_polls_a_running_lookup_to_its_end(wire: Wire, maker: FakeMaker) -> None:
    wire.lookup(wire.open(DIGESTS), 6, 0.0)
    maker.client.waiting("lookup").answer(None)
    wire.shutdown(0.2)
    assert maker.client.sent("status")


def test_the_end_of_an_epoch_fails_every_open_call(wire: Wire, maker: FakeMaker, segment: Path) -> None:
    call = wire.lookup(wire.open(DIGESTS), 6, 0.0)
    segment.unlink()
    events = wire.poll(SMALL_CAP.heartbeat_s)
    assert call in [getattr(event, "call", None) for event in events]


def test_every_call_of_a_sequence_carries_its_salt(wire: Wire, maker: FakeMaker) -> None:
    session = wire.open(DIGESTS, "tenant")
    wire.lookup(session, 6, 0.0)
    answer(wire, maker.client, "lookup", None)
    answer(wire, maker.client, "status", 6)
    wire.free(session, 0, 2, 0.0)
    wire.retrieve(session, 2, 4, 0.0)
    answer(wire, maker.client, "retrieve", slots([0, OBJECT], OBJECT))
    wire.reserve(session, 6, 7, 0.0)
    wire.done_reading(session, 0.0)
    wire.poll(0.0)
    for name in ("lookup", "free", "retrieve", "done", "reserve"):
        salts = {call.arguments[0].cache_salt for call in maker.client.sent(name)}
        assert salts == {"tenant"}, name
