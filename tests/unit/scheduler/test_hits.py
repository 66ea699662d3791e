"""Hits: promised only when everything a resume needs is there and sealed, released on every path exactly once."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache_mp_safe.contract import SKIP, JobOutcome
from lmcache_mp_safe.geometry.groups import Group, GroupKind
from lmcache_mp_safe.identity import PrefixDigests
from lmcache_mp_safe.scheduler.half import Role
from lmcache_mp_safe.scheduler.phases import Phase
from lmcache_mp_safe.testing.fake_wire import FakeWire
from lmcache_mp_safe.testing.world import BLOCK, FULL, STATE, WINDOW, FakeRequest, World, prompt

LENGTH = 4 * BLOCK


def stored(*groups: Group, length: int = LENGTH, step: int = BLOCK, **settings: Any) -> World:
    """A world whose server holds a prompt of this length."""
    world = World(groups or (FULL, STATE), **settings)
    world.run(FakeRequest("first", prompt(length)), step_tokens=step)
    return world


def elsewhere(world: World, **settings: Any) -> World:
    """Another process on the same server; it remembers nothing."""
    return World(world.geometry.groups, wire=world.wire, chunk_tokens=world.geometry.chunk_tokens, **settings)


def load(world: World, request: FakeRequest, external: int, local: int = 0) -> None:
    world.admit(request, external, local)
    world.plan()


# --- what is promised -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [(FULL,), (FULL, STATE), (FULL, WINDOW), (FULL, STATE, WINDOW), (STATE,)])
def test_stored_prefix_is_promised_to_another_process_and_loaded(groups: tuple[Group, ...]) -> None:
    world = elsewhere(stored(*groups))
    request = FakeRequest("r", prompt(LENGTH + 1))
    assert world.matched(request) == LENGTH
    load(world, request, LENGTH)
    assert world.half.counters["loaded_tokens"] == LENGTH
    world.finish(request)
    world.settle()
    world.check_idle()


def test_hit_keeps_at_least_one_token_to_compute() -> None:
    world = elsewhere(stored())
    for name, length, hit in (("a", LENGTH, LENGTH - BLOCK), ("b", LENGTH + 1, LENGTH), ("c", BLOCK, 0), ("d", 1, 0)):
        assert world.matched(FakeRequest(name, prompt(length))) == hit


def test_hit_ends_a_block_earlier_where_vllm_drops_the_last_one_for_its_drafter() -> None:
    world = elsewhere(stored(), margin_tokens=BLOCK)
    for name, length, hit in (
        ("a", LENGTH + 1, LENGTH - BLOCK),
        ("b", LENGTH, LENGTH - 2 * BLOCK),
        ("c", BLOCK + 1, 0),
    ):
        assert world.matched(FakeRequest(name, prompt(length))) == hit


def test_hit_ends_where_a_state_is_even_when_pages_reach_further() -> None:
    world = elsewhere(stored(step=2 * BLOCK))  # states at 2 and 4 blocks only
    assert world.matched(FakeRequest("r", prompt(4 * BLOCK))) == 2 * BLOCK


def test_without_any_boundary_object_nothing_is_promised() -> None:
    world = stored()
    for key in [k for k, slot in world.wire.stored.items() if world.copied[slot][1]]:
        del world.wire.stored[key]
    assert elsewhere(world).matched(FakeRequest("r", prompt(LENGTH + 1))) == 0


def test_prompt_that_ends_inside_a_chunk_hits_at_its_last_full_block() -> None:
    for groups in ((FULL,), (FULL, STATE), (FULL, WINDOW)):
        world = elsewhere(stored(*groups, length=6 * BLOCK + 1, chunk_tokens=4 * BLOCK))
        assert world.matched(FakeRequest("r", prompt(6 * BLOCK + 3))) == 6 * BLOCK


def test_prompt_shorter_than_a_chunk_hits_too() -> None:
    world = elsewhere(stored(FULL, length=3 * BLOCK, chunk_tokens=8 * BLOCK))
    assert world.matched(FakeRequest("r", prompt(3 * BLOCK + 1))) == 3 * BLOCK


def test_other_salt_other_extra_keys_and_other_tokens_hit_nothing() -> None:
    world = elsewhere(stored())
    for name, request in {
        "salt": FakeRequest("salt", prompt(LENGTH + 1), salt="tenant"),
        "lora": FakeRequest("lora", prompt(LENGTH + 1), extra=(("lora", "adapter"),)),
        "tokens": FakeRequest("tokens", prompt(LENGTH + 1, seed=1)),
    }.items():
        assert world.matched(request) == 0, name


def test_only_what_lies_behind_the_local_hit_is_loaded() -> None:
    world = elsewhere(stored(FULL, STATE, WINDOW))
    request = FakeRequest("r", prompt(LENGTH + 1))
    assert world.matched(request, 2 * BLOCK) == 2 * BLOCK
    load(world, request, 2 * BLOCK, local=2 * BLOCK)
    (job,) = world.loaded
    assert len(job.objects) == 3  # two chunks and the boundary object
    boundary = job.objects[-1]
    assert SKIP not in boundary.blocks[1], "the state is always the request's own"
    for chunk in job.objects[:2]:
        assert SKIP not in chunk.blocks[0]


def test_pages_shared_with_other_requests_are_never_written() -> None:
    wide = Group(GroupKind.WINDOW, BLOCK, 4 * BLOCK)
    world = elsewhere(stored(FULL, wide, chunk_tokens=4 * BLOCK))
    request = FakeRequest("r", prompt(LENGTH + 1))
    assert world.matched(request, BLOCK) == 3 * BLOCK
    load(world, request, 3 * BLOCK, local=BLOCK)
    (job,) = world.loaded
    chunk, boundary = job.objects
    assert [block == SKIP for block in chunk.blocks[0]] == [True, False, False, False]
    assert [block == SKIP for block in boundary.blocks[1]] == [True, False, False, False]


# --- seals ------------------------------------------------------------------------------------------------------------


def slots_of_the_hit(world: World) -> list[int]:
    """Slots that a load of the whole stored prompt reads."""
    reader, request = elsewhere(world), FakeRequest("reader", prompt(LENGTH + 1))
    assert reader.matched(request) == LENGTH
    load(reader, request, LENGTH)
    reader.finish(request)
    reader.settle()
    return [slot for copy in reader.loaded[0].objects for slot in copy.slots]


def test_object_whose_seal_is_wrong_is_a_miss_and_mended_by_the_recompute() -> None:
    for spoilt in range(5):
        world = stored()
        slot = slots_of_the_hit(world)[spoilt]
        assert world.wire.pool is not None
        part = world.half.objects.layout.slices[0]
        world.wire.pool.memory[slot + part.seal_offset + 40] ^= 1
        world.copied.pop(slot)
        other = elsewhere(world)
        request = FakeRequest("r", prompt(LENGTH + 1))
        assert other.matched(request) == 0
        assert other.half.counters["seals_rejected"] == 1
        other.admit(request, 0)
        while request.num_computed_tokens < LENGTH:
            other.compute(request, BLOCK)
        other.finish(request)
        other.settle()
        assert other.half.counters["objects_mended"] == 1
        assert slot in other.copied
        other.check_idle()
        again = FakeRequest("again", prompt(LENGTH + 1))
        assert elsewhere(other).matched(again) == LENGTH


def test_object_of_the_same_tokens_from_another_namespace_is_a_miss() -> None:
    """A slot that was given back unwritten may hold it: of another model, or of this one with other weights."""
    world = elsewhere(stored())
    world.wire.namespace = "another"
    assert world.matched(FakeRequest("r", prompt(LENGTH + 1))) == 0
    assert world.half.counters["seals_rejected"]


def test_object_that_arrives_wrong_is_recomputed_not_loaded_again_and_mended() -> None:
    world = elsewhere(stored())
    request = FakeRequest("r", prompt(LENGTH + 1))
    assert world.matched(request) == LENGTH
    world.admit(request, LENGTH)
    world.hold_reports = True
    plan = world.plan()
    (job,) = plan.loads
    bad = len(job.objects) - 1
    from lmcache_mp_safe.contract import JobReport, StepReport

    failed = world.half.reported(
        StepReport(jobs=(JobReport(job.job_id, 0, JobOutcome.BAD_CHECKSUM, bad_objects=(bad,)),))
    )
    world.running, world.hold_reports = [], False
    assert failed == {request.request_id}
    world.pool.unpin(request.blocks)
    request.blocks = []
    for _ in range(3):
        assert world.matched(request) == 0
    world.admit(request, 0)
    while request.num_computed_tokens < LENGTH:
        world.compute(request, BLOCK)
    world.finish(request)
    world.settle()
    assert world.half.counters["objects_mended"] == 1
    world.check_idle()


# --- releases ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("polls", range(6))
def test_abort_at_any_moment_of_the_lookup_releases_everything(polls: int) -> None:
    world = elsewhere(stored())
    request = FakeRequest("r", prompt(LENGTH + 1))
    for _ in range(polls):
        world.half.matched_tokens(request, 0)
    world.finish(request)
    world.settle()
    world.check_idle()


def test_abort_while_loading_releases_when_the_last_rank_has_answered() -> None:
    world = elsewhere(stored(ranks=2), ranks=2)
    world.hold_reports = True
    request = FakeRequest("r", prompt(LENGTH + 1))
    assert world.matched(request) == LENGTH
    load(world, request, LENGTH)
    world.finish(request)
    world.report(ranks=[0])
    assert +world.wire.locks
    assert world.half.has_pending_work
    world.report(ranks=[1])
    world.running = []
    world.settle()
    world.check_idle()


def test_allocation_with_nothing_to_load_releases_the_promise_and_repeats_are_harmless() -> None:
    world = elsewhere(stored())
    request = FakeRequest("r", prompt(LENGTH + 1))
    assert world.matched(request) == LENGTH
    for _ in range(3):
        world.admit(request, 0)
    assert world.plan().loads == ()
    assert not +world.wire.locks
    world.finish(request)
    world.settle()
    world.check_idle()


def test_polling_again_without_an_allocation_changes_nothing_on_the_server() -> None:
    world = elsewhere(stored())
    request = FakeRequest("r", prompt(LENGTH + 1))
    assert world.matched(request) == LENGTH
    before = list(world.wire.log)
    for _ in range(50):
        assert world.matched(request) == LENGTH
    assert world.wire.log == before
    world.finish(request)
    world.check_idle()


def test_other_number_than_the_promised_one_is_reported_as_a_failed_load() -> None:
    for external in (BLOCK, LENGTH + BLOCK):
        world = elsewhere(stored())
        request = FakeRequest("r", prompt(LENGTH + 1))
        assert world.matched(request) == LENGTH
        world.half.allocated(request, external, [[1] * 9, [1] * 9])
        assert not +world.wire.locks
        world.outcome = JobOutcome.STALE_EPOCH
        world.hold_reports = True
        (job,) = world.plan().loads
        assert job.objects == ()
        assert world.report() == {request.request_id}
        assert world.matched(request) == 0
        world.finish(request)
        world.check_idle()


def test_allocation_for_a_request_nobody_knows_is_reported_as_a_failed_load() -> None:
    world = World()
    request = FakeRequest("r", prompt(LENGTH))
    world.half.allocated(request, BLOCK, [[1], [1]])
    (job,) = world.plan().loads
    assert (job.request_id, job.objects) == (request.request_id, ())


def test_preempted_request_is_looked_up_over_all_it_has_by_now() -> None:
    world = elsewhere(stored(length=6 * BLOCK))
    request = FakeRequest("r", prompt(6 * BLOCK + 1), num_prompt_tokens=2 * BLOCK)
    assert world.matched(request) == 6 * BLOCK
    load(world, request, 6 * BLOCK)
    world.pool.unpin(request.blocks)
    request.blocks = []
    assert world.matched(request) == 6 * BLOCK
    world.finish(request)
    world.settle()
    world.check_idle()


def test_two_requests_may_load_the_same_range_at_the_same_time() -> None:
    world = elsewhere(stored())
    requests = [FakeRequest(name, prompt(LENGTH + 1)) for name in "abc"]
    for request in requests:
        assert world.matched(request) == LENGTH
    for request in requests:
        world.admit(request, LENGTH)
    assert len(world.plan().loads) == 3
    for request in requests:
        world.finish(request)
    world.settle()
    world.check_idle()


def test_reused_id_is_another_request() -> None:
    world = elsewhere(stored())
    first = FakeRequest("same", prompt(LENGTH + 1))
    assert world.matched(first) == LENGTH
    second = FakeRequest("same", prompt(LENGTH + 1, seed=3))
    assert world.matched(second) == 0
    assert not +world.wire.locks
    world.finish(second)
    world.check_idle()


# --- trouble ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["lookup", "retrieve"])
@pytest.mark.parametrize("nth", range(4))
def test_lost_answer_is_a_miss_or_a_shorter_hit_and_leaves_nothing(call: str, nth: int) -> None:
    world = elsewhere(stored())
    request = FakeRequest("r", prompt(LENGTH + 1))
    calls = 0
    hit: int | None = None
    for _ in range(20):
        done = sum(entry.startswith(call) for entry in world.wire.log)
        if done - calls == nth:
            world.wire.lose = [call]
        hit = world.half.matched_tokens(request, 0)
        if hit is not None:
            break
    assert hit in (0, LENGTH, LENGTH - BLOCK)
    world.wire.lose = []
    world.finish(request)
    world.settle()
    world.check_idle()


def test_lookup_that_takes_too_long_is_a_miss() -> None:
    world = elsewhere(stored())
    world.wire.held_back = True
    request = FakeRequest("r", prompt(LENGTH + 1))
    assert world.half.matched_tokens(request, 0) is None
    world.now += 2.9
    assert world.half.matched_tokens(request, 0) is None
    world.now += 0.2
    assert world.half.matched_tokens(request, 0) == 0
    world.wire.held_back = False
    world.finish(request)
    world.settle()
    world.check_idle()


def test_promise_is_renewed_after_its_lease() -> None:
    world = elsewhere(stored())
    request = FakeRequest("r", prompt(LENGTH + 1))
    assert world.matched(request) == LENGTH
    lookups = sum(entry.startswith("lookup") for entry in world.wire.log)
    world.now += 61
    assert world.half.matched_tokens(request, 0) is None
    assert world.matched(request) == LENGTH
    assert sum(entry.startswith("lookup") for entry in world.wire.log) > lookups
    world.finish(request)
    world.check_idle()


@pytest.mark.parametrize("polls", range(6))
def test_server_restart_at_any_moment_of_the_lookup_is_a_miss(polls: int) -> None:
    world = elsewhere(stored())
    request = FakeRequest("r", prompt(LENGTH + 1))
    for _ in range(polls):
        world.half.matched_tokens(request, 0)
    world.wire.restart_server()
    assert world.matched(request) == 0
    world.finish(request)
    world.settle()
    world.check_idle()


def test_server_restart_under_a_load_ends_with_what_the_workers_report() -> None:
    world = elsewhere(stored())
    world.hold_reports = True
    request = FakeRequest("r", prompt(LENGTH + 1))
    assert world.matched(request) == LENGTH
    world.admit(request, LENGTH)
    world.wire.restart_server()
    (job,) = world.plan().loads
    assert job.epoch != world.wire.epoch
    assert world.report(outcome=JobOutcome.STALE_EPOCH) == {request.request_id}
    assert world.matched(request) == 0
    world.hold_reports = False
    world.finish(request)
    world.settle()
    world.check_idle()


def test_server_that_is_away_costs_nothing() -> None:
    world = elsewhere(stored())
    world.wire.up = False
    before = list(world.wire.log)
    world.run(FakeRequest("r", prompt(LENGTH + 1)))
    assert world.wire.log == before


# --- requests that are left alone -------------------------------------------------------------------------------------


def test_request_that_reads_no_prefix_cache_hits_nothing() -> None:
    world = elsewhere(stored())
    assert world.matched(FakeRequest("r", prompt(LENGTH + 1), skips_reading=True)) == 0


def test_producer_loads_nothing() -> None:
    world = elsewhere(stored(), role=Role(may_load=False, may_store=True))
    assert world.matched(FakeRequest("r", prompt(LENGTH + 1))) == 0


def test_request_whose_tokens_may_be_rewritten_uses_no_cache() -> None:
    world = World()
    world.run(FakeRequest("r", prompt(LENGTH), is_resumable=True))
    assert world.copied == {}
    assert elsewhere(stored()).matched(FakeRequest("s", prompt(LENGTH + 1), is_resumable=True)) == 0


@pytest.mark.parametrize("extra", [object(), ("\ud800",), ({"a": object()},)])
def test_request_that_cannot_be_named_is_computed_and_nothing_raises(extra: object) -> None:
    world = World()
    world.run(FakeRequest("r", prompt(LENGTH), extra=extra))
    assert world.copied == {}
    world.check_idle()


@pytest.mark.parametrize("salt", ["", "tenant", "a/b@c\\d\x00", "x" * 10_000, "🙂", "\ud800", "\n"])
def test_salt_of_any_content_never_raises(salt: str) -> None:
    world = World()
    world.run(FakeRequest("r", prompt(LENGTH), salt=salt))
    world.check_idle()


def test_eager_prefetch_has_the_answer_when_vllm_first_asks() -> None:
    world = elsewhere(stored(), eager_prefetch=True)
    request = FakeRequest("r", prompt(LENGTH + 1))
    world.half.arrived(request)
    for _ in range(4):
        world.plan()
    assert world.half.matched_tokens(request, 0) == LENGTH
    world.finish(request)
    world.settle()
    world.check_idle()


# --- reset ------------------------------------------------------------------------------------------------------------


def test_after_a_reset_nothing_from_before_is_hit_and_nothing_is_held() -> None:
    world = stored()
    old = world.wire
    waiting = FakeRequest("waiting", prompt(LENGTH + 1))
    assert world.matched(waiting) == LENGTH
    assert world.half.reset() is True
    assert world.wire is not old
    assert world.matched(waiting) == 0
    assert world.matched(FakeRequest("r", prompt(LENGTH + 1))) == 0
    world.settle()
    world.plan()
    assert old.was_shut_down
    assert world.half.pinned_blocks == 0


def test_wire_of_before_a_reset_stays_until_all_of_it_is_ended_on_the_server() -> None:
    world = World()
    old = world.wire
    old.owes = True
    world.half.reset()
    for _ in range(3):
        world.plan()
    assert not old.was_shut_down
    old.owes = False
    world.plan()
    assert old.was_shut_down


def test_two_resets_lead_to_two_namespaces() -> None:
    generations: list[str] = []
    world = World()
    make = world._make_wire
    world.half._make_wire = lambda size, generation, epoch: (
        generations.append(generation)
        or make(  # type: ignore
            size, generation, epoch
        )
    )
    world.half.reset()
    world.half.reset()
    assert len(set(generations)) == 2
    assert "" not in generations


def test_phases_are_seen_in_order() -> None:
    world = elsewhere(stored())
    request = FakeRequest("r", prompt(LENGTH + 1))
    seen = []
    for _ in range(6):
        world.half.matched_tokens(request, 0)
        phase = world.half._book[request.request_id].hit.record.phase
        if not seen or seen[-1] is not phase:
            seen.append(phase)
    assert seen == [Phase.LOOKING_UP, Phase.PROBING, Phase.HOLDING, Phase.PROMISED]
    assert isinstance(world.wire, FakeWire)


def test_a_prompt_that_this_process_never_stored_costs_no_digest_of_a_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    world.run(FakeRequest("a", prompt(4 * BLOCK)))
    asked: list[int] = []
    boundary = PrefixDigests.boundary
    monkeypatch.setattr(PrefixDigests, "boundary", lambda self, b: asked.append(b) or boundary(self, b))
    stranger = prompt(40 * BLOCK, seed=1)
    world.half.matched_tokens(FakeRequest("b", stranger), 0)
    assert asked == []
    world.half.matched_tokens(FakeRequest("c", prompt(4 * BLOCK) + stranger), 0)
    assert asked == [4 * BLOCK, 3 * BLOCK, 2 * BLOCK, BLOCK], "the chunks below those are known"
