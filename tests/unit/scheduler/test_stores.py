"""Stores: what is stored, from which blocks, and when the watermark moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from lmcache_mp_safe.contract import JobOutcome, JobReport, StepReport
from lmcache_mp_safe.geometry.groups import Group, GroupKind
from lmcache_mp_safe.metrics.counts import Count
from lmcache_mp_safe.scheduler.half import Role
from lmcache_mp_safe.scheduler.progress import Prefix, verified_tokens
from lmcache_mp_safe.scheduler.runs import Run
from lmcache_mp_safe.scheduler.stores import CHUNKS_PER_PLAN, MAX_ATTEMPTS, RETRY_S
from lmcache_mp_safe.testing.fake_wire import FakeWire
from lmcache_mp_safe.testing.world import (
    BLOCK,
    FULL,
    STATE,
    WINDOW,
    FakeBlock,
    FakePool,
    FakeRequest,
    World,
    prompt,
)
from lmcache_mp_safe.wire import SessionId


def started(world: World, request: FakeRequest) -> FakeRequest:
    """A request that missed and was admitted."""
    assert world.matched(request) == 0
    world.admit(request, 0)
    return request


def being_copied(world: World) -> FakeRequest:
    """A request whose first block is being copied by workers that report nothing yet."""
    world.hold_reports = True
    request = started(world, FakeRequest("r", prompt(BLOCK)))
    world.compute(request, BLOCK)
    world.plan([request])
    assert world.plan([request]).stores
    return request


def compute_all(world: World, request: FakeRequest, step_tokens: int = BLOCK) -> None:
    while request.num_computed_tokens < request.num_prompt_tokens:
        world.compute(request, step_tokens)


# --- verified length --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt_tokens", "tokens", "computed", "verified"),
    [
        (100, 100, 0, 0),
        (100, 100, 60, 60),
        (100, 100, 100, 100),  # prefill done, nothing sampled yet
        (100, 101, 100, 100),
        (100, 105, 104, 104),
        (100, 105, 108, 104),  # drafts scheduled ahead: only what was accepted counts, and not its last token
        (100, 105, 105, 104),
    ],
)
def test_verified_tokens_end_before_anything_a_running_step_may_write(
    prompt_tokens: int, tokens: int, computed: int, verified: int
) -> None:
    request = FakeRequest("r", prompt(tokens), num_prompt_tokens=prompt_tokens, num_computed_tokens=computed)
    assert verified_tokens(request) == verified


# --- certification ----------------------------------------------------------------------------------------------------


def test_block_is_copied_in_a_later_plan_than_the_one_that_first_saw_it() -> None:
    world = World()
    request = started(world, FakeRequest("r", prompt(4 * BLOCK)))
    world.compute(request, BLOCK)
    seen_in: dict[int, int] = {}
    for _ in range(3):
        before = {b.block_id for b in world.pool.blocks if b.ref_cnt > 1}
        plan = world.plan([request])
        pinned = {b.block_id for b in world.pool.blocks if b.ref_cnt > 1} - before
        seen_in |= dict.fromkeys(pinned, plan.number)
        for job in plan.stores:
            for block in {b for part in job.object.blocks for b in part}:
                assert seen_in[block] < plan.number
    assert world.copied


def test_only_states_that_vllm_itself_would_serve_are_stored() -> None:
    """A step over several blocks leaves null blocks in between; a position in the table would name them."""
    world = World()
    request = FakeRequest("r", prompt(6 * BLOCK))
    world.run(request, step_tokens=3 * BLOCK)
    boundaries = [blocks for blocks in world.copied.values() if blocks[1]]
    chunks = [blocks for blocks in world.copied.values() if blocks[0]]
    assert len(boundaries) == 2
    assert len(chunks) == 6
    world.check_idle()


def test_uncertified_chunk_stops_the_run_and_an_uncertified_boundary_is_just_absent() -> None:
    world = World()
    request = started(world, FakeRequest("r", prompt(5 * BLOCK)))
    world.compute(request, 5 * BLOCK)
    missing = world.pool.find(request.block_hash(2, BLOCK), 0)
    assert missing is not None
    world.pool.uncache(missing)
    for _ in range(6):
        world.plan([request])
    assert world.half.num_stored_tokens(request.request_id) == 2 * BLOCK


def test_second_look_that_finds_another_block_starts_over_with_the_new_one() -> None:
    world = World()
    request = started(world, FakeRequest("r", prompt(BLOCK)))
    world.compute(request, BLOCK)
    plan = world.plan([request])
    assert not plan.stores
    old = world.pool.find(request.block_hash(0, BLOCK), 0)
    assert old is not None
    world.pool.uncache(old)
    new = world.pool.take()
    world.pool.cache(new, request.block_hash(0, BLOCK), 0)
    first = world.plan([request])
    assert all(new.block_id not in job.object.blocks[0] for job in first.stores)
    second = world.plan([request])
    assert new.block_id in [b for job in second.stores for b in job.object.blocks[0]]
    assert old.block_id not in [b for job in (*first.stores, *second.stores) for b in job.object.blocks[0]]
    world.finish(request)
    world.settle()
    assert new.ref_cnt == 1  # the test's own


def test_second_look_that_finds_none_stores_nothing_and_holds_nothing() -> None:
    world = World()
    request = started(world, FakeRequest("r", prompt(BLOCK)))
    world.compute(request, BLOCK)
    world.plan([request])
    for block in request.blocks:
        world.pool.uncache(block)
    world.plan([request])
    world.finish(request)
    world.settle()
    assert world.copied == {}
    world.check_idle()


def test_running_copy_makes_the_forward_wait_once_vllm_moved_the_hash_away() -> None:
    world = World()
    world.hold_reports = True
    request = started(world, FakeRequest("r", prompt(BLOCK)))
    world.compute(request, BLOCK)
    world.plan([request])
    jobs = world.plan([request]).stores
    assert jobs
    assert world.plan([request]).wait_for == ()
    world.pool.uncache(request.blocks[0])
    moved = {job.job_id for job in jobs if request.blocks[0].block_id in [b for p in job.object.blocks for b in p]}
    assert set(world.plan([request]).wait_for) == moved != set()


def test_source_blocks_stay_held_until_every_rank_has_answered() -> None:
    world = World(ranks=2)
    request = being_copied(world)
    world.finish(request)
    assert world.half.pinned_blocks == world.pool.held == 2
    world.report(ranks=[1])
    assert world.half.pinned_blocks == 2
    world.report(ranks=[0])
    assert world.half.pinned_blocks == 0
    world.running = []
    world.settle()
    world.check_idle()


def test_blocks_of_an_ended_request_are_stored_by_their_pins() -> None:
    world = World()
    request = FakeRequest("r", prompt(4 * BLOCK))
    started(world, request)
    world.compute(request, 4 * BLOCK)
    world.finish(request)  # never scheduled again after its prefill
    assert world.half.has_pending_work
    world.settle()
    assert len([b for b in world.copied.values() if b[0]]) == 4
    world.check_idle()


# --- the watermark ----------------------------------------------------------------------------------------------------


def test_lookup_hit_does_not_move_the_watermark() -> None:
    world = World()
    world.run(FakeRequest("a", prompt(4 * BLOCK)))
    other = World(wire=world.wire)  # another process: it remembers nothing
    request = FakeRequest("b", prompt(5 * BLOCK))
    assert other.matched(request) == 4 * BLOCK
    assert other.half.num_stored_tokens(request.request_id) == 0


def test_acknowledged_commit_moves_the_watermark() -> None:
    world = World()
    request = started(world, FakeRequest("r", prompt(3 * BLOCK)))
    compute_all(world, request)
    for _ in range(5):
        world.plan([request])
    assert world.half.num_stored_tokens(request.request_id) == 3 * BLOCK


@pytest.mark.parametrize("trouble", ["refused", "lost", "reserve lost", "copy failed"])
def test_store_that_was_not_acknowledged_leaves_the_watermark(trouble: str) -> None:
    world = World(groups=(FULL,))
    world.wire.refuse_commits = trouble == "refused"
    world.wire.lose = {"lost": ["commit"], "reserve lost": ["reserve"]}.get(trouble, [])
    if trouble == "copy failed":
        world.outcome = JobOutcome.COPY_FAILED
    request = started(world, FakeRequest("r", prompt(BLOCK)))
    compute_all(world, request)
    for _ in range(5):
        world.plan([request])
    assert world.half.num_stored_tokens(request.request_id) == 0
    world.finish(request)
    world.settle()
    world.check_idle()


def test_full_pool_leaves_the_watermark_and_is_tried_again_a_bounded_number_of_times() -> None:
    world = World(groups=(FULL,))
    world.wire.capacity = 0
    request = started(world, FakeRequest("r", prompt(BLOCK)))
    compute_all(world, request)
    for _ in range(20):
        world.plan([request])
        world.now += RETRY_S
    assert world.half.num_stored_tokens(request.request_id) == 0
    assert sum(entry.startswith("reserve") for entry in world.wire.log) == MAX_ATTEMPTS
    assert world.half.pinned_blocks == 0


def test_full_pool_that_has_room_again_is_used() -> None:
    world = World(groups=(FULL,))
    world.wire.capacity = 0
    request = started(world, FakeRequest("r", prompt(BLOCK)))
    compute_all(world, request)
    world.plan([request])
    world.wire.capacity = 8
    for _ in range(8):
        world.now += RETRY_S
        world.plan([request])
    assert world.half.num_stored_tokens(request.request_id) == BLOCK


def test_chunk_that_is_stored_already_counts_once_a_lookup_proves_it() -> None:
    world = World(groups=(FULL,))
    world.run(FakeRequest("a", prompt(2 * BLOCK)))
    other = World(groups=(FULL,), wire=world.wire)
    request = FakeRequest("b", prompt(2 * BLOCK))
    other.wire.lose = ["lookup"]  # it does not learn of the hit
    started(other, request)
    compute_all(other, request)
    other.plan([request])
    assert other.half.num_stored_tokens(request.request_id) == 0
    for _ in range(6):
        other.plan([request])
    assert other.half.num_stored_tokens(request.request_id) == 2 * BLOCK
    assert other.copied == {}


def test_out_of_order_acknowledgements_advance_over_the_contiguous_run_only() -> None:
    world = World(groups=(FULL,), call_bytes=1)
    request = started(world, FakeRequest("r", prompt(3 * BLOCK)))
    world.compute(request, 3 * BLOCK)
    world.hold_reports = True
    while not world.running:
        world.plan([request])
    slow, world.running, world.hold_reports = world.running[:1], world.running[1:], False
    for _ in range(8):
        world.plan([request])
    assert len(world.wire.stored) == 2, "the other two chunks are stored by now"
    assert world.half.num_stored_tokens(request.request_id) == 0
    world.running = slow
    for _ in range(3):
        world.plan([request])
    assert world.half.num_stored_tokens(request.request_id) == 3 * BLOCK


def test_hit_whose_load_failed_leaves_the_watermark_and_everything_is_offered_again() -> None:
    world = World(groups=(FULL,))
    world.run(FakeRequest("a", prompt(2 * BLOCK)))
    request = FakeRequest("b", prompt(3 * BLOCK))
    assert world.matched(request) == 2 * BLOCK
    world.outcome = JobOutcome.BAD_CHECKSUM
    world.admit(request, 2 * BLOCK)
    world.plan()
    world.outcome = JobOutcome.DONE
    assert world.half.num_stored_tokens(request.request_id) == 0
    assert world.matched(request) == 0


def test_evicted_chunk_is_stored_again() -> None:
    world = World(groups=(FULL,))
    world.run(FakeRequest("a", prompt(2 * BLOCK)))
    world.wire.evict()
    copies = len(world.copied)
    request = FakeRequest("b", prompt(2 * BLOCK))
    started(world, request)
    compute_all(world, request)
    for _ in range(8):
        world.plan([request])
    assert world.half.num_stored_tokens(request.request_id) == 2 * BLOCK
    assert len(world.wire.stored) == 2
    assert copies


def test_chunks_that_this_process_stored_are_not_offered_to_the_server_again() -> None:
    world = World()
    world.run(FakeRequest("a", prompt(4 * BLOCK)))
    reserves = [entry for entry in world.wire.log if entry.startswith("reserve")]
    request = FakeRequest("b", prompt(4 * BLOCK))
    request.num_computed_tokens = 0
    world.half.allocated(request, 0, ())
    for block in [b for b in world.pool.blocks if b.block_hash]:
        world.pool.pin([block])
        request.blocks.append(block)
    request.num_computed_tokens = 3 * BLOCK
    world.plan([request])
    assert [entry for entry in world.wire.log if entry.startswith("reserve")] == reserves
    world.finish(request)
    world.settle()
    world.check_idle()


# --- what is worth storing --------------------------------------------------------------------------------------------


def test_decoded_tokens_are_stored_only_when_asked_for() -> None:
    for save, stored in ((False, 2), (True, 4)):
        world = World(groups=(FULL,), save_decode_cache=save)
        request = started(world, FakeRequest("r", prompt(2 * BLOCK)))
        world.compute(request, 2 * BLOCK)
        request.token_ids += prompt(2 * BLOCK + 1, seed=9)
        world.compute(request, 2 * BLOCK)
        world.finish(request)
        world.settle()
        assert len(world.copied) == stored


def test_user_may_cap_what_is_stored_of_a_request() -> None:
    world = World(groups=(FULL,))
    request = FakeRequest("r", prompt(4 * BLOCK), user_configs={"lmcache.max_offload_tokens": 2 * BLOCK + 1})
    world.run(request)
    assert len(world.copied) == 2


@pytest.mark.parametrize("value", ["many", -1, None, True, 1.5, [1]])
def test_cap_that_is_no_number_is_ignored(value: object) -> None:
    world = World(groups=(FULL,))
    world.run(FakeRequest("r", prompt(4 * BLOCK), user_configs={"lmcache.max_offload_tokens": value}))
    assert len(world.copied) == 4


def test_attention_only_prompt_gets_one_object_for_its_tail() -> None:
    world = World(groups=(FULL,), chunk_tokens=4 * BLOCK)
    world.run(FakeRequest("r", prompt(6 * BLOCK + 1)))
    sizes = sorted(len(blocks[0]) for blocks in world.copied.values())
    assert sizes == [2, 4]  # the tail of two blocks, and the chunk


def test_window_boundaries_are_stored_at_chunk_ends_and_at_the_end_of_the_prompt() -> None:
    world = World(groups=(FULL, WINDOW), chunk_tokens=4 * BLOCK)
    world.run(FakeRequest("r", prompt(9 * BLOCK + 1)))
    windows = [blocks for blocks in world.copied.values() if blocks[1]]
    assert len({blocks[1] for blocks in windows}) == 3  # boundaries 4, 8 and 9 blocks


def test_chunked_local_group_costs_nothing_at_its_own_chunk_ends() -> None:
    local = Group(GroupKind.CHUNKED_LOCAL, BLOCK, 4 * BLOCK)
    world = World(groups=(FULL, local), chunk_tokens=4 * BLOCK)
    world.run(FakeRequest("r", prompt(8 * BLOCK + 1)))
    assert len(world.copied) == 2
    assert [blocks for blocks in world.copied.values() if blocks[1]] == []


def test_consumer_stores_nothing() -> None:
    world = World(role=Role(may_load=True, may_store=False))
    world.run(FakeRequest("r", prompt(4 * BLOCK)))
    assert world.copied == {}
    world.check_idle()


def test_pins_stay_within_their_budget_and_nothing_is_lost_by_it() -> None:
    world = World(blocks=40, pin_fraction=0.1, call_bytes=1)
    request = started(world, FakeRequest("r", prompt(8 * BLOCK)))
    world.compute(request, 8 * BLOCK)
    for _ in range(60):
        world.plan([request])
        assert world.half.pinned_blocks <= 4
    assert world.half.num_stored_tokens(request.request_id) == 8 * BLOCK


def test_object_larger_than_the_budget_is_stored_when_nothing_else_is_pinned() -> None:
    world = World(groups=(FULL,), blocks=20, pin_fraction=0.05, chunk_tokens=8 * BLOCK)
    world.run(FakeRequest("r", prompt(8 * BLOCK)))
    assert len(world.copied) == 1


def test_shortage_of_blocks_takes_old_pins_that_nobody_else_holds_and_they_are_copied_later() -> None:
    world = World(groups=(FULL,))
    request = started(world, FakeRequest("r", prompt(BLOCK)))
    world.compute(request, BLOCK)
    world.wire.held_back = True  # a slow server: the slot does not come
    world.plan([request])
    for _ in range(5):
        world.plan([request], preempted=True)
    assert world.half.pinned_blocks == 1, "a block with another owner helps nobody"
    (block,) = request.blocks
    world.pool.unpin([block])
    world.plan(preempted=True)
    assert world.half.pinned_blocks == 0
    world.wire.held_back = False
    for _ in range(6):
        world.plan([request])
    assert world.half.num_stored_tokens(request.request_id) == BLOCK
    world.pool.pin([block])


def test_granted_slot_waits_for_a_preempted_request_to_compute_its_prefix_again() -> None:
    world = World(groups=(FULL,))
    request = started(world, FakeRequest("r", prompt(BLOCK)))
    world.compute(request, BLOCK)
    world.plan([request])
    (block,) = request.blocks
    world.pool.uncache(block)  # preempted, and the block was reused
    for _ in range(3):
        assert not world.plan([request]).stores
    request.num_computed_tokens = 0
    world.compute(request, BLOCK)
    for _ in range(4):
        world.plan([request])
    assert world.half.num_stored_tokens(request.request_id) == BLOCK
    assert sum(entry.startswith("reserve") for entry in world.wire.log) == 1


def test_reservation_past_its_lease_is_not_copied_into_but_given_back_and_mended() -> None:
    world = World(groups=(FULL,))
    request = started(world, FakeRequest("r", prompt(BLOCK)))
    world.compute(request, BLOCK)
    world.plan([request])
    world.now += world.wire.lease_s + 1
    assert world.plan([request]).stores == ()
    assert not world.wire.writing, "nobody could store it for the server's own time"
    world.now += RETRY_S
    for _ in range(6):
        world.plan([request])
    assert world.half.counters[Count.OBJECTS_MENDED] == 1
    assert world.half.num_stored_tokens(request.request_id) == BLOCK
    world.finish(request)
    world.settle()
    world.check_idle()


def test_reservation_whose_lease_ends_while_it_is_copied_is_given_back_and_counts_as_nothing() -> None:
    world = World(groups=(FULL,))
    request = being_copied(world)
    world.now += world.wire.lease_s + 1
    assert world.wire.writing
    world.report()
    assert not any(entry.startswith("commit") for entry in world.wire.log)
    assert not world.wire.writing
    assert world.half.num_stored_tokens(request.request_id) == 0


def test_slots_of_a_copy_that_failed_are_not_made_readable() -> None:
    world = World(groups=(FULL,))
    being_copied(world)
    world.report(outcome=JobOutcome.COPY_FAILED)
    assert world.wire.writing
    assert not world.wire.stored


@pytest.mark.parametrize("outcome", [JobOutcome.DONE, JobOutcome.STALE_EPOCH])
def test_slots_of_a_server_that_was_given_up_are_given_back_when_the_last_copy_has_ended(outcome: JobOutcome) -> None:
    world = World(groups=(FULL,))
    world.hold_reports = True
    request = started(world, FakeRequest("r", prompt(2 * BLOCK)))
    world.compute(request, 2 * BLOCK)
    world.plan([request])
    first, *others = (job.job_id for job in world.plan([request]).stores)
    assert others
    world.wire.stand_still()
    world.plan()
    for job in (first, *others):
        assert "give back" not in world.wire.log
        world.half.reported(StepReport(jobs=(JobReport(job, 0, outcome),)))
    assert "give back" in world.wire.log


def test_server_restart_forgets_what_was_acknowledged_and_stores_it_again() -> None:
    world = World()
    request = started(world, FakeRequest("r", prompt(3 * BLOCK)))
    compute_all(world, request)
    for _ in range(5):
        world.plan([request])
    assert world.half.num_stored_tokens(request.request_id) == 3 * BLOCK
    world.wire.restart_server()
    world.plan([request])
    assert world.half.num_stored_tokens(request.request_id) == 0
    for _ in range(8):
        world.plan([request])
    assert world.half.num_stored_tokens(request.request_id) == 3 * BLOCK
    world.finish(request)
    world.settle()
    world.check_idle()


def test_long_prompt_is_stored_again_from_its_first_chunk_after_a_restart() -> None:
    chunks = 2 * CHUNKS_PER_PLAN + 3
    world = World(groups=(FULL,), blocks=4 * chunks, wire=FakeWire(4096 + 4 * 100, capacity=2 * chunks))
    request = started(world, FakeRequest("r", prompt(chunks * BLOCK)))
    compute_all(world, request, chunks * BLOCK)
    for _ in range(2):
        for _ in range(10):
            world.plan([request])
        assert world.half.num_stored_tokens(request.request_id) == chunks * BLOCK
        world.wire.restart_server()
    assert world.half.counters["internal_errors"] == 0


def test_engine_steps_on_until_the_workers_know_that_the_server_is_gone() -> None:
    world = World()
    request = started(world, FakeRequest("r", prompt(3 * BLOCK)))
    compute_all(world, request)
    world.wire.lose_server()
    world.finish(request)  # notices, behind the last plan of the last request
    assert world.half.has_pending_work
    assert world.plan().segment is None
    assert not world.half.has_pending_work


def test_pins_of_copies_under_way_outlive_the_server_until_the_workers_answer() -> None:
    world = World()
    request = being_copied(world)
    world.wire.restart_server()
    world.finish(request)
    assert world.half.pinned_blocks == 4  # those of the old copies, and the same blocks again for the new server
    world.hold_reports = False
    world.report(outcome=JobOutcome.STALE_EPOCH)
    assert world.half.pinned_blocks == 2
    world.settle()
    world.check_idle()


def test_states_are_stored_next_to_pages_that_the_chunk_holds() -> None:
    world = World(groups=(FULL, STATE), chunk_tokens=2 * BLOCK)
    world.run(FakeRequest("r", prompt(3 * BLOCK)), step_tokens=BLOCK)
    with_tail = [blocks for blocks in world.copied.values() if blocks[0] and blocks[1]]
    assert len(with_tail) == 2  # boundaries 1 and 3 blocks lie inside a chunk: a tail page and the state
    world.check_idle()


class CountingPool(FakePool):
    """Counts the questions that are asked of it."""

    asked = 0

    def find_all(self, block_hashes: Sequence[Any], group: int) -> list[FakeBlock] | None:
        self.asked += len(block_hashes)
        return super().find_all(block_hashes, group)


@pytest.mark.parametrize("groups", [(FULL,), (FULL, STATE), (FULL, WINDOW)], ids=["full", "state", "window"])
def test_a_prompt_that_is_stored_costs_no_later_step_anything(groups: tuple[Group, ...]) -> None:
    world = World(groups, blocks=4000, save_decode_cache=False, wire=FakeWire(4096, capacity=4000))
    requests = [started(world, FakeRequest(f"r{n}", prompt(6 * BLOCK, seed=n))) for n in range(40)]
    considered: list[str] = []
    for request in requests:
        world.compute(request, 6 * BLOCK)
    stores = world.half._live.stores
    consider = stores.consider
    stores.consider = lambda prefix, *rest: considered.append(prefix.source.name) or consider(prefix, *rest)
    for _ in range(12):
        world.plan(requests)
    assert set(considered) == {request.name for request in requests}
    considered.clear()
    for _ in range(5):
        for request in requests:
            request.token_ids.append(7)
            request.num_computed_tokens += 1
        world.plan(requests)
    assert considered == []


def test_each_token_is_hashed_and_each_page_looked_up_a_fixed_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_mp_safe.testing.world.FakePool", CountingPool)
    costs = []
    for chunks in (20, 40, 80):
        world = World((FULL,), blocks=1000, wire=FakeWire(4096, capacity=1000))
        request = FakeRequest("r", prompt(chunks * BLOCK))
        read: list[int] = []
        tokens = request.tokens
        request.tokens = lambda start, end, read=read, tokens=tokens: read.append(end - start) or tokens(start, end)
        world.run(request, step_tokens=2 * BLOCK)
        assert len(world.copied) == chunks
        costs.append((sum(read) / chunks, world.pool.asked / chunks))
    assert costs[0] == costs[1] == costs[2] == (BLOCK, 2)


def test_an_eviction_that_is_noticed_makes_a_stored_prompt_worth_looking_at_again() -> None:
    world = World((FULL,), save_decode_cache=False)
    first = started(world, FakeRequest("r", prompt(8 * BLOCK)))
    world.compute(first, 8 * BLOCK)
    for _ in range(6):
        world.plan([first])
    stores = world.half._live.stores
    assert stores.due([first.request_id]) == []
    run = Run(stores_prefix(world, first), [], False, 0, SessionId(99))
    stores._note_evicted(run, 7, 3)
    assert stores.due([first.request_id]) == [first.request_id]
    assert world.half.num_stored_tokens(first.request_id) == 3 * BLOCK


def stores_prefix(world: World, request: FakeRequest) -> Prefix:
    return world.half._book[request.request_id].prefix


@pytest.mark.parametrize(("call_bytes", "calls"), [(1, 12), (1 << 40, 3)], ids=["a setting", "the pool's share"])
def test_all_that_a_step_computed_is_reserved_at_once_in_calls_that_the_server_can_grant(
    call_bytes: int, calls: int
) -> None:
    world = World((FULL,), call_bytes=call_bytes)  # its pool has room for 64 objects, a sixteenth of that is 4
    request = started(world, FakeRequest("r", prompt(12 * BLOCK)))
    world.compute(request, 12 * BLOCK)
    world.plan([request])
    assert [line.split()[0] for line in world.wire.log].count("reserve") == calls
    for _ in range(4):
        world.plan([request])
    assert world.half.num_stored_tokens(request.request_id) == 12 * BLOCK


def test_a_long_prompt_that_only_vllm_has_is_taken_up_in_parts() -> None:
    world = World((FULL,), blocks=1000, wire=FakeWire(4096, capacity=2000))
    request = started(world, FakeRequest("r", prompt(100 * BLOCK)))
    world.compute(request, 100 * BLOCK)
    pinned = []
    for _ in range(12):
        pinned.append(world.half.pinned_blocks)
        world.plan([request])
    assert max(pinned) <= 3 * CHUNKS_PER_PLAN
    assert world.half.num_stored_tokens(request.request_id) == 100 * BLOCK
