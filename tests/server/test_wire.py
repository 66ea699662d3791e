"""The wire layer against the stock LMCache server."""

from __future__ import annotations

import mmap
import os
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from lmcache_mp_safe.testing.leftovers import server_inventory
from lmcache_mp_safe.testing.server import LMCacheServer
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
from lmcache_mp_safe.wire.keys import object_key
from lmcache_mp_safe.wire.tokens import synthetic_tokens

pytestmark = [pytest.mark.server, pytest.mark.timeout(120)]

OBJECT = 16384
FLAGS = ("--shm-name NAME", "--no-l1-use-lazy", "--supported-transfer-mode auto")
E = TypeVar("E")


def digests(count: int) -> list[bytes]:
    return [secrets.token_bytes(32) for _ in range(count)]


class Driver:
    """Polls a wire in real time."""

    def __init__(self, url: str, **settings: Any) -> None:
        self.wire = Wire(WireConfig(url, f"test-{secrets.token_hex(6)}", OBJECT, **settings))
        self.events: list[WireEvent] = []
        self.slowest_poll_s = 0.0
        self.wire.start(time.monotonic())

    @property
    def now(self) -> float:
        return time.monotonic()

    def poll(self) -> None:
        before = time.monotonic()
        self.events += self.wire.poll(before)
        self.slowest_poll_s = max(self.slowest_poll_s, time.monotonic() - before)

    def until(self, condition: Callable[[], Any], within_s: float = 20.0) -> None:
        end = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < end, f"not within {within_s} s; why_down={self.wire.why_down!r}"
            time.sleep(0.002)
            self.poll()

    def first(self, kind: type[E], within_s: float = 20.0) -> E:
        """The next event of this kind; takes it and everything before it."""
        found: list[E] = []

        def there() -> bool:
            while self.events and not found:
                event = self.events.pop(0)
                if isinstance(event, kind):
                    found.append(event)
            return bool(found)

        self.until(there, within_s)
        return found[0]

    def answer(self, kind: type[E], call: CallId, within_s: float = 20.0) -> E:
        """The answer to this call, which must be of this kind."""
        answers: list[WireEvent] = []

        def there() -> bool:
            answers.extend(e for e in self.events if getattr(e, "call", None) == call)
            self.events = [e for e in self.events if getattr(e, "call", None) != call]
            return bool(answers)

        self.until(there, within_s)
        (answer,) = answers
        assert isinstance(answer, kind), answer
        return answer

    def connect(self) -> Connected:
        return self.first(Connected)

    def found(self, sequence: list[bytes], salt: str = "") -> tuple[SessionId, int]:
        session = self.wire.open(sequence, salt)
        return session, self.answer(LookupAnswered, self.wire.lookup(session, len(sequence), self.now)).found

    def store(self, sequence: list[bytes], contents: list[bytes], salt: str = "") -> Reserved:
        """Reserve, write through the shared memory as a worker would, commit, wait until a lookup sees it."""
        session = self.wire.open(sequence, salt)
        reserved = self.answer(Reserved, self.wire.reserve(session, 0, len(sequence), self.now))
        for index, offset in reserved.offsets.items():
            self.write(offset, contents[index])
        committed = self.answer(Committed, self.wire.commit(session, reserved.call, self.now))
        assert committed.accepted
        self.wire.close(session, self.now)

        def visible() -> bool:
            asked, found = self.found(sequence, salt)
            self.wire.close(asked, self.now)
            return found == len(sequence)

        self.until(visible)
        return reserved

    def write(self, offset: int, content: bytes) -> None:
        segment = self.wire.segment
        assert segment is not None
        file = os.open(f"/dev/shm/{segment.name}", os.O_RDWR)
        with mmap.mmap(file, segment.size) as view:
            view[offset : offset + len(content)] = content
        os.close(file)

    def read(self, offset: int) -> bytes:
        assert self.wire.pool is not None
        return self.wire.pool.read(offset, OBJECT)

    def settled(self) -> bool:
        held = self.wire.held()
        return (held.sessions, held.locks, held.retrieves, held.unanswered) == (0, 0, 0, 0)


@pytest.fixture(scope="module")
def shared_server() -> Iterator[LMCacheServer]:
    with LMCacheServer(l1_size_gb=0.25) as server:
        yield server


@pytest.fixture
def driver(shared_server: LMCacheServer) -> Iterator[Driver]:
    driver = Driver(shared_server.url)
    driver.connect()
    yield driver
    driver.wire.shutdown(2.0)


@pytest.fixture
def server() -> Iterator[LMCacheServer]:
    """A server that the test may stop, kill or replace."""
    with LMCacheServer(l1_size_gb=0.25) as server:
        yield server


# --- a server that is well ------------------------------------------------------------------------------------------


def test_what_is_stored_is_found_and_comes_back_byte_for_byte(driver: Driver) -> None:
    sequence, contents = digests(5), [secrets.token_bytes(OBJECT) for _ in range(5)]
    driver.store(sequence, contents)
    session, found = driver.found([*sequence, *digests(1)])
    assert found == 5
    retrieved = driver.answer(Retrieved, driver.wire.retrieve(session, 1, 5, driver.now))
    assert [driver.read(offset) for offset in retrieved.offsets] == contents[1:]
    driver.wire.close(session, driver.now)
    driver.until(driver.settled)


def test_what_was_not_committed_is_not_found_until_it_is_given_back(driver: Driver) -> None:
    sequence = digests(2)
    session = driver.wire.open(sequence)
    reserved = driver.answer(Reserved, driver.wire.reserve(session, 0, 2, driver.now))
    driver.wire.close(session, driver.now)
    asked, found = driver.found(sequence)
    assert found == 0
    driver.wire.close(asked, driver.now)
    driver.wire.give_back(reserved.call, driver.now)
    driver.until(driver.settled)
    asked, found = driver.found(sequence)
    assert found == 2, "nobody could store it"
    driver.wire.close(asked, driver.now)
    driver.until(driver.settled)


def test_another_sequence_or_salt_finds_nothing(driver: Driver) -> None:
    sequence = digests(2)
    driver.store(sequence, [bytes(OBJECT)] * 2, salt="tenant")
    for other, salt in [(sequence, ""), (sequence, "someone/else@"), ([sequence[1], sequence[0]], "tenant")]:
        session, found = driver.found(other, salt)
        assert found == 0
        driver.wire.close(session, driver.now)


def test_a_salt_that_the_server_refuses_still_stores_and_finds(driver: Driver) -> None:
    sequence = digests(1)
    driver.store(sequence, [b"x" * OBJECT], salt="a/b@c\\d\0\ud800" * 30)


def test_a_sequence_can_grow_in_one_session(driver: Driver) -> None:
    sequence = digests(4)
    session = driver.wire.open(sequence[:2])
    for start, end in [(0, 2), (2, 4)]:
        driver.wire.extend(session, sequence[start:end] if start else [])
        reserved = driver.answer(Reserved, driver.wire.reserve(session, start, end, driver.now))
        assert sorted(reserved.offsets) == list(range(start, end))
        driver.answer(Committed, driver.wire.commit(session, reserved.call, driver.now))
    driver.wire.close(session, driver.now)
    driver.until(lambda: driver.found(sequence)[1] == 4)


def test_an_object_that_is_stored_gets_no_second_slot(driver: Driver) -> None:
    sequence = digests(3)
    driver.store(sequence[:2], [bytes(OBJECT)] * 2)
    session = driver.wire.open(sequence)
    reserved = driver.answer(Reserved, driver.wire.reserve(session, 0, 3, driver.now))
    assert list(reserved.offsets) == [2]
    driver.wire.close(session, driver.now)


def test_a_retry_of_an_open_range_does_not_take_its_record_over(driver: Driver) -> None:
    # With one key for both, the second call's record would replace the first one's, and the first commit would
    # publish what the second has reserved.
    sequence = digests(3)
    session = driver.wire.open(sequence)
    first = driver.answer(Reserved, driver.wire.reserve(session, 0, 2, driver.now))
    second = driver.answer(Reserved, driver.wire.reserve(session, 0, 3, driver.now))
    again = driver.answer(Reserved, driver.wire.reserve(session, 0, 2, driver.now))
    assert (sorted(first.offsets), sorted(second.offsets), sorted(again.offsets)) == ([0, 1], [2], [])
    assert driver.answer(Committed, driver.wire.commit(session, first.call, driver.now)).accepted
    time.sleep(0.1)
    asked, found = driver.found(sequence)
    assert found == 2, "object 2 has not been written yet"
    assert driver.answer(Committed, driver.wire.commit(session, second.call, driver.now)).accepted
    for one in (asked, session):
        driver.wire.close(one, driver.now)
    driver.until(lambda: driver.found(sequence)[1] == 3)


def test_two_retrieves_of_one_range_hold_a_lock_each(driver: Driver) -> None:
    # The server would keep one record for both if their keys were equal, and the second end would release nothing.
    sequence = digests(2)
    driver.store(sequence, [bytes(OBJECT)] * 2)
    one, other = driver.found(sequence)[0], driver.found(sequence)[0]
    for session in (one, other):
        driver.answer(Retrieved, driver.wire.retrieve(session, 0, 2, driver.now))
    for session in (one, other):
        driver.wire.close(session, driver.now)
    driver.until(driver.settled)
    assert locks_left(driver, sequence) is False


def test_locks_that_are_not_given_back_would_be_seen_by_the_check_above(driver: Driver) -> None:
    sequence = digests(2)
    driver.store(sequence, [bytes(OBJECT)] * 2)
    session, _ = driver.found(sequence)
    assert locks_left(driver, sequence) is True
    driver.wire.close(session, driver.now)
    driver.until(lambda: locks_left(driver, sequence) is False)


def locks_left(driver: Driver, sequence: list[bytes]) -> bool:
    """Whether anybody has a lock on the first object: a retrieve that looked nothing up succeeds only then.

    Asked with the bare client and never ended, for the lock is somebody else's.
    """
    link = driver.wire._link
    assert link is not None
    chunk = link.connection.server_chunk
    name = f"locks-left-{secrets.token_hex(8)}"
    key = object_key(driver.wire._config.namespace, name, "", synthetic_tokens(sequence[:1], chunk), 0, chunk)
    client = link.connection.client
    answer = client.prepare_retrieve(key, link.connection.instance).result(10.0)
    client.end_session(name).result(10.0)
    return bool(answer.success)


def test_aborts_at_any_moment_leave_nothing(driver: Driver) -> None:
    sequence = digests(4)
    driver.store(sequence, [bytes(OBJECT)] * 4)
    for polls in range(12):
        session = driver.wire.open(sequence)
        driver.wire.lookup(session, 4, driver.now)
        retrieving = False
        for _ in range(polls):
            time.sleep(0.0005)
            driver.poll()
            if not retrieving and driver.wire._sessions[session].locked:
                retrieving = True
                driver.wire.retrieve(session, 1, 3, driver.now)
        driver.wire.close(session, driver.now)
    driver.until(driver.settled)
    assert locks_left(driver, sequence) is False


def test_many_lookups_at_once_are_all_answered(driver: Driver) -> None:
    sequence = digests(3)
    driver.store(sequence, [bytes(OBJECT)] * 3)
    calls = [driver.wire.lookup(driver.wire.open(sequence), 3, driver.now) for _ in range(60)]
    answers = [driver.answer(LookupAnswered, call) for call in calls]
    assert {answer.found for answer in answers} == {3}
    for answer in answers:
        driver.wire.close(answer.session, driver.now)
    driver.until(driver.settled)


def test_a_poll_never_blocks(driver: Driver) -> None:
    sequence = digests(2)
    driver.store(sequence, [bytes(OBJECT)] * 2)
    assert driver.slowest_poll_s < 0.25


def test_two_wires_on_one_server_do_not_share_anything(shared_server: LMCacheServer, driver: Driver) -> None:
    other = Driver(shared_server.url)
    other.connect()
    sequence = digests(2)
    driver.store(sequence, [b"a" * OBJECT] * 2)
    assert other.found(sequence)[1] == 0
    other.wire.shutdown(2.0)
    session, found = driver.found(sequence)
    assert found == 2
    driver.wire.close(session, driver.now)


def test_the_shutdown_of_one_engine_leaves_the_other_its_layout(shared_server: LMCacheServer) -> None:
    first, second = Driver(shared_server.url), Driver(shared_server.url)
    second.wire = Wire(first.wire._config)
    second.wire.start(time.monotonic())
    for one in (first, second):
        one.connect()
    sequence = digests(2)
    first.store(sequence, [bytes(OBJECT)] * 2)
    first.wire.shutdown(2.0)
    assert second.found(sequence)[1] == 2
    second.wire.shutdown(2.0)


# --- a server that is not -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shm_name", "flags"),
    [(None, ("--no-l1-use-lazy",)), ("", ("--no-l1-use-lazy", "--supported-transfer-mode", "auto"))],
    ids=["default transfer mode", "no shm name"],
)
def test_a_server_that_does_not_lend_its_memory_is_named_with_its_flags(
    shm_name: str | None, flags: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with LMCacheServer(l1_size_gb=0.25, shm_name=shm_name, flags=flags) as server:
        driver = Driver(server.url, connect_timeout_s=3.0)
        driver.until(lambda: all(flag in driver.wire.why_down for flag in FLAGS))
        assert not driver.wire.up
        logged = [record for record in caplog.records if FLAGS[0] in record.getMessage()]
        assert len(logged) == 1
        driver.wire.shutdown(1.0)


def test_no_server_is_down_and_calls_fail_at_once() -> None:
    driver = Driver("tcp://127.0.0.1:9", connect_timeout_s=1.0)
    driver.until(lambda: "no LMCache server answers" in driver.wire.why_down)
    call = driver.wire.lookup(driver.wire.open(digests(1)), 1, driver.now)
    assert driver.answer(CallFailed, call, within_s=0.5).kind is FailureKind.LOST
    before = time.monotonic()
    driver.wire.shutdown(1.0)
    assert time.monotonic() - before < 3.0


def test_a_restart_under_the_same_pool_name_is_a_new_epoch(server: LMCacheServer) -> None:
    driver = Driver(server.url, heartbeat_s=1.0, call_timeout_s=2.0)
    before = driver.connect()
    sequence = digests(2)
    driver.store(sequence, [bytes(OBJECT)] * 2)
    held, _ = driver.found(sequence)
    server.restart()
    assert driver.first(Lost).epoch == before.epoch
    after = driver.connect()
    assert after.epoch > before.epoch
    assert after.segment.name == before.segment.name
    driver.wire.close(held, driver.now)
    assert driver.found(sequence)[1] == 0
    driver.store(sequence, [b"n" * OBJECT] * 2)
    driver.wire.shutdown(2.0)


def test_a_killed_server_is_noticed_and_calls_fail_fast(server: LMCacheServer) -> None:
    driver = Driver(server.url, heartbeat_s=1.0, call_timeout_s=2.0)
    driver.connect()
    server.kill()
    driver.first(Lost, within_s=6.0)
    call = driver.wire.lookup(driver.wire.open(digests(1)), 1, driver.now)
    assert driver.answer(CallFailed, call, within_s=0.5).kind is FailureKind.LOST
    assert driver.settled()
    assert driver.slowest_poll_s < 0.25
    driver.wire.shutdown(1.0)


def test_a_stopped_server_times_out_and_is_used_again_when_it_goes_on(server: LMCacheServer) -> None:
    driver = Driver(server.url, heartbeat_s=1.0, call_timeout_s=2.0, lookup_timeout_s=0.5)
    driver.connect()
    sequence = digests(2)
    driver.store(sequence, [bytes(OBJECT)] * 2)
    server.pause()
    call = driver.wire.lookup(session := driver.wire.open(sequence), 2, driver.now)
    assert driver.answer(CallFailed, call, within_s=2.0).kind in (FailureKind.TIMEOUT, FailureKind.LOST)
    driver.wire.close(session, driver.now)
    driver.until(lambda: not driver.wire.up, within_s=8.0)
    server.resume()
    driver.until(lambda: driver.wire.up)
    asked, found = driver.found(sequence)
    assert found == 2
    driver.wire.close(asked, driver.now)
    driver.until(driver.settled)
    driver.wire.shutdown(2.0)


def test_a_short_stop_is_a_late_answer_and_leaves_no_lock(server: LMCacheServer) -> None:
    driver = Driver(server.url, heartbeat_s=30.0, call_timeout_s=20.0, lookup_timeout_s=0.3)
    epoch = driver.connect().epoch
    sequence = digests(2)
    driver.store(sequence, [bytes(OBJECT)] * 2)
    server.pause()
    call = driver.wire.lookup(session := driver.wire.open(sequence), 2, driver.now)
    assert driver.answer(CallFailed, call, within_s=2.0).kind is FailureKind.TIMEOUT
    driver.wire.close(session, driver.now)
    server.resume()
    driver.until(driver.settled)
    assert driver.wire.epoch == epoch
    assert locks_left(driver, sequence) is False
    driver.wire.shutdown(2.0)


@pytest.mark.parametrize("state", ["lookup", "locks", "retrieve", "reading"])
def test_a_server_that_was_given_up_while_it_stood_still_keeps_no_lock(server: LMCacheServer, state: str) -> None:
    driver = Driver(server.url, heartbeat_s=0.5, call_timeout_s=1.0, lookup_timeout_s=0.5)
    driver.connect()
    sequence = digests(3)
    driver.store(sequence, [bytes(OBJECT)] * 3)
    if state == "lookup":
        server.pause()
        driver.wire.lookup(driver.wire.open(sequence), 3, driver.now)
    else:
        session, _ = driver.found(sequence)
        if state == "reading":
            driver.answer(Retrieved, driver.wire.retrieve(session, 0, 2, driver.now))
        server.pause()
        if state == "retrieve":
            driver.wire.retrieve(session, 0, 2, driver.now)
    driver.until(lambda: not driver.wire.up)
    server.resume()
    driver.until(lambda: driver.wire.up)
    driver.until(driver.settled)
    assert server_inventory(server) == {}
    driver.wire.shutdown(2.0)


def test_the_end_of_a_retrieve_that_never_was_releases_nothing(driver: Driver, shared_server: LMCacheServer) -> None:
    sequence = digests(2)
    driver.store(sequence, [bytes(OBJECT)] * 2)
    session, _ = driver.found(sequence)
    link = driver.wire._link
    assert link is not None
    key = driver.wire._key(link, driver.wire._sessions[session], 0, 2, unique=True)
    before = server_inventory(shared_server)["server: read_locked_count"]
    assert link.connection.client.commit_retrieve(key, link.connection.instance).wait(5)
    assert server_inventory(shared_server)["server: read_locked_count"] == before >= 2
    driver.wire.close(session, driver.now)
    driver.until(driver.settled)


def test_what_was_queued_for_a_dead_server_does_not_reach_the_next_one(server: LMCacheServer) -> None:
    driver = Driver(server.url, heartbeat_s=1.0, call_timeout_s=2.0)
    driver.connect()
    server.kill()
    time.sleep(0.5)
    # The client's socket queues these; nobody can have read them.
    for _ in range(5):
        driver.wire.lookup(driver.wire.open(digests(1)), 1, driver.now)
    driver.first(Lost, within_s=8.0)
    server.start()
    driver.connect()
    time.sleep(1.0)
    # A lookup whose status nobody asks for stays in the server for ever.
    assert active_lookups(server) == 0
    driver.wire.shutdown(2.0)


def active_lookups(server: LMCacheServer) -> int:
    """Lookup jobs that the server keeps, from its status page."""
    import json
    import urllib.request

    with urllib.request.urlopen(f"{server.http_url}/status", timeout=5) as page:
        text = json.dumps(json.load(page))
    return int(text.split('"active_prefetch_jobs": ')[1].split(",")[0].rstrip("}"))


def test_two_servers_with_one_pool_name_are_told_apart(server: LMCacheServer) -> None:
    with LMCacheServer(l1_size_gb=0.25, shm_name=server.shm_name):  # unlinks the first one's live segment
        driver = Driver(server.url, connect_timeout_s=4.0)
        driver.until(lambda: "is not the pool of the LMCache server" in driver.wire.why_down)
        assert not driver.wire.up
        assert "--shm-name" in driver.wire.why_down
        driver.wire.shutdown(1.0)
