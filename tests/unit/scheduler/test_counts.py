"""What is counted is what happened: every lookup ends once, with the reason it ended for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lmcache_mp_safe.contract import JobOutcome
from lmcache_mp_safe.metrics.counts import Miss
from lmcache_mp_safe.metrics.tally import Sample
from lmcache_mp_safe.scheduler.half import CachedTokens
from lmcache_mp_safe.testing.world import BLOCK, FULL, STATE, FakeRequest, World, prompt

LENGTH = 4 * BLOCK
PAGE = 100  # bytes of a page in a `World`


def other_process(**settings: object) -> World:
    """A world whose server holds a prompt of `LENGTH` that another process stored."""
    first = World()
    first.run(FakeRequest("first", prompt(LENGTH)), step_tokens=BLOCK)
    return World(first.geometry.groups, wire=first.wire, chunk_tokens=BLOCK, **settings)  # type: ignore[arg-type]


def request(name: str = "r", **fields: object) -> FakeRequest:
    return FakeRequest(name, prompt(LENGTH + 1), **fields)  # type: ignore[arg-type]


def absent(world: World) -> None:
    world.matched(FakeRequest("r", prompt(LENGTH + 1, seed=9)))


def not_deeper(world: World) -> None:
    world.matched(request(), LENGTH)


def not_deeper_any_more(world: World) -> None:
    asked = request()
    world.matched(asked)
    world.matched(asked, LENGTH)


def late(world: World) -> None:
    asked = request()
    world.wire.held_back = True
    world.half.matched_tokens(asked, 0)
    world.now += 1000
    world.half.matched_tokens(asked, 0)


def call_failed(world: World) -> None:
    world.wire.lose = ["lookup"]
    world.matched(request())


def bad_seal(world: World) -> None:
    assert world.wire.pool is not None
    world.wire.pool.memory[:] = bytes(len(world.wire.pool.memory))
    world.matched(request())


def server_down(world: World) -> None:
    asked = request()
    world.wire.up = False
    for _ in range(3):
        world.matched(asked)


def server_lost(world: World) -> None:
    asked = request()
    world.matched(asked)
    world.wire.restart_server()
    world.matched(asked)


def failed_before(world: World) -> None:
    asked = request()
    world.admit(asked, world.matched(asked))
    world.outcome = JobOutcome.COPY_FAILED
    world.plan()
    world.admit(asked, 0)
    world.matched(asked)


def bypassed(world: World) -> None:
    asked = request(is_resumable=True)
    for _ in range(3):
        world.matched(asked)


def unwanted(world: World) -> None:
    asked = request(skips_reading=True)
    for _ in range(3):
        world.matched(asked)


def not_taken(world: World) -> None:
    asked = request()
    world.matched(asked)
    world.admit(asked, 0)


def other_number(world: World) -> None:
    asked = request()
    world.matched(asked)
    world.admit(asked, BLOCK)


def local_changed(world: World) -> None:
    asked = request()
    world.matched(asked, 2 * BLOCK)
    world.matched(asked, 0)


def expired(world: World) -> None:
    asked = request()
    world.matched(asked)
    world.now += 10_000
    world.matched(asked)


def ended(world: World) -> None:
    asked = request()
    world.matched(asked)
    world.finish(asked)


SCENES: dict[Miss, list[Callable[[World], None]]] = {
    Miss.ABSENT: [absent],
    Miss.NOT_DEEPER: [not_deeper, not_deeper_any_more],
    Miss.LATE: [late],
    Miss.CALL_FAILED: [call_failed],
    Miss.BAD_SEAL: [bad_seal],
    Miss.SERVER_DOWN: [server_down],
    Miss.SERVER_LOST: [server_lost],
    Miss.FAILED_BEFORE: [failed_before],
    Miss.BYPASSED: [bypassed],
    Miss.UNWANTED: [unwanted],
    Miss.NOT_TAKEN: [not_taken],
    Miss.OTHER_NUMBER: [other_number],
    Miss.LOCAL_CHANGED: [local_changed],
    Miss.EXPIRED: [expired],
    Miss.ENDED: [ended],
}
GOES_ON = {Miss.LOCAL_CHANGED, Miss.EXPIRED}  # the lookup that follows is still open


@pytest.mark.parametrize("reason", Miss)
def test_every_miss_has_its_reason_and_is_counted_once(reason: Miss) -> None:
    for scene in SCENES[reason]:
        world = other_process()
        scene(world)
        misses = {key: amount for key, amount in world.half.counters.items() if key.startswith("miss:")}
        assert misses == {reason.value: 1}, scene.__name__
        world.check_lookups(open_lookups=reason in GOES_ON)


def test_a_hit_is_counted_once_however_often_vllm_asks() -> None:
    world = other_process()
    asked = request()
    for _ in range(3):
        assert world.matched(asked) == LENGTH
    world.admit(asked, LENGTH)
    world.plan()
    counted = world.half.counters
    chunks, boundary = 4 * PAGE, PAGE  # four attention pages and one state
    assert counted["lookups"] == counted["hits"] == 1
    assert counted["promised_tokens"] == counted["loaded_tokens"] == LENGTH
    assert counted["promised_bytes"] == counted["loaded_bytes"] == chunks + boundary
    world.check_lookups()


def test_stored_tokens_and_bytes_are_those_of_the_acknowledged_objects_of_all_ranks() -> None:
    world = World((FULL, STATE), ranks=2, chunk_tokens=2 * BLOCK)
    world.run(FakeRequest("r", prompt(3 * BLOCK)), step_tokens=BLOCK)
    counted = world.half.counters
    # one chunk of two pages; boundaries 1 and 3 with a tail of one page and a state, boundary 2 with a state
    assert counted["objects_stored"] == 4
    assert counted["stored_tokens"] == 2 * BLOCK + BLOCK + BLOCK
    assert counted["stored_bytes"] == 2 * (2 + 2 + 1 + 2) * PAGE


def test_time_without_a_server_is_counted_from_step_to_step() -> None:
    world = other_process()
    world.plan()
    world.wire.up = False
    for seconds in (1.0, 2.5):
        world.now += seconds
        world.plan()
    world.wire.up = True
    world.now += 7
    world.plan()
    assert world.half.counters["bypass_seconds"] == pytest.approx(3.5)


def test_levels_are_what_is_held_now() -> None:
    world = other_process()
    asked = request()
    world.admit(asked, world.matched(asked))
    world.hold_reports = True
    world.plan()
    sample = world.half.take_sample()
    assert sample is not None
    assert sample.levels["jobs:load"] == 1
    assert sample.levels["slots:reading"] == 5
    world.hold_reports = False
    world.plan()
    sample = world.half.take_sample()
    assert sample is not None
    assert sample.levels["jobs:load"] == sample.levels["slots:reading"] == 0
    assert world.half.take_sample() is None


def test_samples_add_up_to_the_counters() -> None:
    world = other_process()
    total = Sample()
    for name in ("a", "b", "c"):
        asked = request(name)
        world.admit(asked, world.matched(asked))
        world.plan()
        total = total.merged(world.half.take_sample() or Sample())
    assert total.sums == dict(world.half.counters)
    assert total.sums["hits"] == 3


def test_cached_tokens_of_a_request_are_those_of_its_last_admission() -> None:
    world = other_process()
    asked = request()
    assert world.half.cached_tokens(asked.request_id) == CachedTokens()
    world.admit(asked, world.matched(asked, BLOCK), BLOCK)
    assert world.half.cached_tokens(asked.request_id) == CachedTokens(BLOCK, 0), "nothing has arrived yet"
    world.plan()
    assert world.half.cached_tokens(asked.request_id) == CachedTokens(BLOCK, LENGTH)
    world.admit(asked, 0)  # vLLM says so again, now that the load is there
    assert world.half.cached_tokens(asked.request_id) == CachedTokens(BLOCK, LENGTH)
    world.wire.up = False
    world.matched(asked, 2 * BLOCK)  # preempted
    world.admit(asked, 0)
    assert world.half.cached_tokens(asked.request_id) == CachedTokens(2 * BLOCK, 0)


def test_a_load_that_failed_brought_no_tokens() -> None:
    world = other_process()
    asked = request()
    world.admit(asked, world.matched(asked))
    world.outcome = JobOutcome.BAD_CHECKSUM
    world.plan()
    assert world.half.cached_tokens(asked.request_id) == CachedTokens()
    assert world.half.counters["loads_failed"] == 1
    assert world.half.counters["loaded_tokens"] == world.half.counters["loaded_bytes"] == 0
