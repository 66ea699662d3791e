"""Faults that were reported of other connectors, each as a small input to the scheduler half.

docs/validation.md says what every case is about; the numbers here are its rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lmcache_mp_safe.contract import SKIP, JobOutcome, JobReport, LoadJob, StepReport, StoreJob
from lmcache_mp_safe.geometry.groups import Group, GroupKind
from lmcache_mp_safe.scheduler.half import Role
from lmcache_mp_safe.scheduler.stores import RETRY_S
from lmcache_mp_safe.testing.world import BLOCK, FULL, STATE, WINDOW, FakeRequest, World, prompt

DRAFT = Group(GroupKind.APPEND_ONLY, BLOCK)


def elsewhere(world: World, groups: Sequence[Group] = (), **settings: object) -> World:
    """Another process on the same server; it remembers nothing."""
    return World(groups or world.geometry.groups, wire=world.wire, chunk_tokens=world.geometry.chunk_tokens, **settings)


def started(world: World, request: FakeRequest) -> FakeRequest:
    """A request that missed and was admitted."""
    assert world.matched(request) == 0
    world.admit(request, 0)
    return request


def holding(length: int, *groups: Group, step: int = BLOCK, **settings: object) -> World:
    """A world whose server holds a prompt of this length."""
    world = World(groups or (FULL, STATE), **settings)
    world.run(FakeRequest("first", prompt(length)), step_tokens=step)
    return world


def preempt(world: World, request: FakeRequest) -> None:
    """vLLM takes the blocks away and forgets what was computed; the request waits again."""
    world.pool.unpin(request.blocks)
    request.blocks = []
    request.num_computed_tokens = 0
    world.plan(preempted=True)


def states_stored(world: World) -> set[int]:
    """Blocks of the recurrent group that were copied."""
    return {blocks[1][0] for blocks in world.copied.values() if blocks[1]}


def pages_stored(world: World) -> set[int]:
    return {block for blocks in world.copied.values() for block in blocks[0]}


# --- states: what is stored is the state at that boundary, or nothing -------------------------------------------------


def test_attention_pages_deeper_than_the_state_are_not_counted_as_computed() -> None:
    """R1, H5: another request left attention pages for two blocks and a state for one."""
    world = World(role=Role(may_load=False, may_store=True))
    other = started(world, FakeRequest("other", prompt(2 * BLOCK)))
    world.compute(other, BLOCK)
    world.compute(other, BLOCK)
    world.pool.uncache(other.table[1, 1])
    request = FakeRequest("r", prompt(8 * BLOCK))
    world.half.matched_tokens(request, BLOCK)  # vLLM reconciles its groups to one block
    world.half.allocated(request, 0, ())
    request.num_computed_tokens = BLOCK
    world.plan([request])
    for _ in range(6):
        world.plan([request])
        assert world.half.num_stored_tokens(request.request_id) <= BLOCK
    assert states_stored(world) <= {other.table[1, 0].block_id}


def test_boundary_inside_a_step_has_no_state_and_gets_none() -> None:
    """R4, R3: the last full block and the tail are one step, so the state at its start never exists."""
    world = World()
    request = started(world, FakeRequest("r", prompt(2 * BLOCK + 3)))
    world.compute(request, BLOCK)
    world.compute(request, BLOCK + 3)
    scratch = request.table[1, 1]
    world.pool.uncache(scratch)  # vLLM has no state there: the slot of the table is null, or scratch moved on
    for _ in range(6):
        world.plan([request])
    world.finish(request)
    world.settle()
    assert states_stored(world) == {request.table[1, 0].block_id}
    reader, again = elsewhere(world), FakeRequest("again", prompt(2 * BLOCK + 3))
    assert reader.matched(again) == BLOCK
    reader.finish(again)
    world.check_idle()


def test_one_step_over_the_whole_prompt_leaves_one_state() -> None:
    """R7: every slot of the table but the last is null."""
    world = World()
    request = FakeRequest("r", prompt(6 * BLOCK))
    world.run(request, step_tokens=6 * BLOCK)
    assert states_stored(world) == {request.table[1, 5].block_id}


def test_chunk_of_several_blocks_is_not_mistaken_for_a_state_at_its_end() -> None:
    """H7: chunks of two blocks, steps of three: states are at three and six blocks, none at two and four."""
    world = World(chunk_tokens=2 * BLOCK)
    request = FakeRequest("r", prompt(7 * BLOCK))
    world.run(request, step_tokens=3 * BLOCK)
    assert states_stored(world) == {request.table[1, column].block_id for column in (2, 5, 6)}
    for length, hit in ((7 * BLOCK, 6), (6 * BLOCK, 3), (5 * BLOCK, 3), (3 * BLOCK, 0)):
        assert elsewhere(world).matched(FakeRequest(str(length), prompt(length))) == hit * BLOCK


def test_state_in_another_column_than_its_boundary_is_stored_under_its_own_boundary() -> None:
    """H9, R27: a checkpoint inside a step may leave the state of the first block in the second column of the table."""
    world = World()
    request = started(world, FakeRequest("r", prompt(3 * BLOCK)))
    world.compute(request, 3 * BLOCK)
    checkpoint = request.table[1, 1]
    world.pool.uncache(request.table[1, 2])
    world.pool.cache(checkpoint, request.block_hash(0, BLOCK), 1)
    for _ in range(6):
        world.plan([request])
    assert states_stored(world) == {checkpoint.block_id}
    world.finish(request)
    world.settle()
    assert elsewhere(world).matched(FakeRequest("again", prompt(3 * BLOCK + 1))) == BLOCK


def test_nulled_and_scratch_slots_of_the_table_are_never_read() -> None:
    """H11, R26, R40: whatever the table says; here it is full of scratch, and the hook on allocation never came."""
    world = World()
    request = FakeRequest("r", prompt(3 * BLOCK))
    assert world.matched(request) == 0
    world.compute(request, BLOCK)
    world.compute(request, BLOCK)
    real = {column: request.table[1, column].block_id for column in (0, 1)}
    for column in (0, 1, 2):
        request.table[1, column] = world.pool.take()
    for _ in range(6):
        world.plan([request])
    assert states_stored(world) == set(real.values())


def test_decoding_over_a_boundary_without_a_state_stores_pages_and_no_state() -> None:
    """R24, H26: decoded tokens are stored like any others, from what vLLM itself would serve."""
    world = World(save_decode_cache=True)
    request = started(world, FakeRequest("r", prompt(BLOCK)))
    world.compute(request, BLOCK)
    request.token_ids += prompt(BLOCK + 1, seed=5)
    world.compute(request, BLOCK)
    world.pool.uncache(request.table[1, 1])
    for _ in range(6):
        world.plan([request])
    assert pages_stored(world) == {request.table[0, column].block_id for column in (0, 1)}
    assert states_stored(world) == {request.table[1, 0].block_id}
    again = FakeRequest("again", [*request.token_ids, 1])
    assert elsewhere(world).matched(again) == BLOCK


@pytest.mark.parametrize("margin", [0, BLOCK])
def test_what_is_stored_does_not_depend_on_where_the_drafter_makes_hits_end(margin: int) -> None:
    """R15: boundaries come from vLLM's pool, not from the method of speculation."""
    world = World(margin_tokens=margin)
    request = FakeRequest("r", prompt(4 * BLOCK))
    world.run(request, step_tokens=BLOCK)
    assert states_stored(world) == {request.table[1, column].block_id for column in range(4)}


def test_group_of_a_drafter_lies_in_the_same_objects_and_decides_nothing() -> None:
    """R31: no group has an object of its own that could be missing, and one lookup is for all of them."""
    world = World((FULL, DRAFT, STATE))
    request = FakeRequest("r", prompt(2 * BLOCK))
    world.run(request, step_tokens=BLOCK)
    chunks = [blocks for blocks in world.copied.values() if blocks[0]]
    assert len(chunks) == 2
    assert all(blocks[1] for blocks in chunks)
    one, other = World((FULL, STATE)), World((FULL, DRAFT, STATE))
    for beside in (one, other):
        beside.run(FakeRequest("a", prompt(2 * BLOCK)), step_tokens=BLOCK)
        assert elsewhere(beside).matched(FakeRequest("b", prompt(2 * BLOCK + 1))) == 2 * BLOCK


def test_state_goes_into_the_block_before_the_scratch_ones_and_nowhere_else() -> None:
    """R20, R26: the reader's table has null blocks before the state and scratch blocks behind it."""
    world = elsewhere(holding(3 * BLOCK))
    request = FakeRequest("r", prompt(3 * BLOCK + 1))
    assert world.matched(request) == 3 * BLOCK
    world.half.allocated(request, 3 * BLOCK, [[11, 12, 13, 14], [0, 0, 21, 91, 92]])
    (job,) = world.half.build_plan([], False).loads
    assert [copy.blocks[0] for copy in job.objects] == [(11,), (12,), (13,), ()]
    assert [copy.blocks[1] for copy in job.objects] == [(), (), (), (21,)]


# --- hits: a boundary that every group can resume at ------------------------------------------------------------------


@pytest.mark.parametrize("local", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 4 * BLOCK, 9 * BLOCK, 10**9])
def test_any_local_hit_against_an_empty_server_is_no_hit_and_raises_nothing(local: int) -> None:
    """R13: also a local hit deeper than the prompt, and one that is no multiple of a block."""
    world = World()
    request = FakeRequest("r", prompt(4 * BLOCK + 1))
    assert world.matched(request, local) == 0
    assert world.half.counters["internal_errors"] == 0


@pytest.mark.parametrize("local", range(5 * BLOCK + 1))
def test_hit_ends_at_a_boundary_with_a_state_whatever_the_local_hit(local: int) -> None:
    """R30, R25: states are at two and four blocks. No boundary in between is ever answered."""
    world = elsewhere(holding(5 * BLOCK, step=2 * BLOCK))
    request = FakeRequest("r", prompt(5 * BLOCK))
    external = world.matched(request, local)
    assert external == (4 * BLOCK - local if local < 4 * BLOCK else 0)
    world.finish(request)
    world.check_idle()


def test_local_and_external_hit_together_resume_at_one_boundary() -> None:
    """R5, R22, H23: pages of the local hit stay as they are, and the state comes whole from the server."""
    world = elsewhere(holding(5 * BLOCK, chunk_tokens=2 * BLOCK))
    request = FakeRequest("r", prompt(5 * BLOCK + 1))
    assert world.matched(request, 3 * BLOCK) == 2 * BLOCK
    local = [[1, 2, 3, 14, 15], [0, 0, 0, 0, 25]]
    world.half.allocated(request, 2 * BLOCK, local)
    (job,) = world.half.build_plan([], False).loads
    written = [{block for copy in job.objects for block in copy.blocks[group]} - {SKIP} for group in (0, 1)]
    assert written == [{14, 15}, {25}]


# --- the watermark ----------------------------------------------------------------------------------------------------


def test_token_that_was_sampled_and_not_computed_is_not_stored_at_the_end() -> None:
    """R41: seven tokens computed and one sampled make eight known ones; the second block is not full."""
    for decoded, blocks in ((BLOCK, 1), (BLOCK + 1, 2)):
        world = World((FULL,))
        request = started(world, FakeRequest("r", prompt(BLOCK)))
        world.compute(request, BLOCK)
        request.token_ids += prompt(decoded, seed=3)
        world.compute(request, decoded - 1)
        request.num_computed_tokens += 1  # asynchronous scheduling counts ahead of what was computed
        block_hash = request.block_hash(1, BLOCK)
        if world.pool.find(block_hash, 0) is None:
            world.pool.cache(world.pool.take(), block_hash, 0)  # hashed, as by a step that is just being scheduled
        world.finish(request)
        world.settle()
        assert len(world.copied) == blocks


def test_after_a_failed_load_exactly_what_is_computed_is_stored() -> None:
    """H6a, H24: the hit was four blocks; nothing of it was ever there."""
    world = elsewhere(holding(4 * BLOCK, FULL))
    request = FakeRequest("r", prompt(6 * BLOCK))
    assert world.matched(request) == 4 * BLOCK
    world.wire.evict()
    world.admit(request, 4 * BLOCK)
    world.outcome = JobOutcome.BAD_CHECKSUM
    world.plan()
    world.outcome = JobOutcome.DONE
    world.wire.stored.clear()
    world.wire.locks.clear()
    world.pool.unpin(request.blocks)
    request.blocks = []
    assert world.matched(request) == 0
    world.admit(request, 0)
    for computed in range(1, 7):
        world.compute(request, BLOCK)
        for _ in range(4):
            world.plan([request])
        assert world.half.num_stored_tokens(request.request_id) == computed * BLOCK
        assert len(world.wire.stored) == computed


def test_hit_that_lost_to_another_connector_counts_for_nothing() -> None:
    """H6b, R44: vLLM asks several connectors and loads through another one."""
    world = elsewhere(holding(4 * BLOCK, FULL))
    request = FakeRequest("r", prompt(6 * BLOCK))
    assert world.matched(request) == 4 * BLOCK
    world.half.allocated(request, 0, ())
    assert world.plan().loads == ()
    assert not +world.wire.locks
    request.num_computed_tokens = 2 * BLOCK  # what the other connector loaded
    world.compute(request, BLOCK)
    for _ in range(4):
        world.plan([request])
    assert world.half.num_stored_tokens(request.request_id) <= 3 * BLOCK


def test_object_without_a_slot_does_not_take_the_others_with_it() -> None:
    """H31: the server has one chunk of three already; the other two are stored by the same call."""
    world = holding(3 * BLOCK, FULL)
    middle = list(world.wire.stored)[1]
    kept = world.wire.stored[middle]
    world.wire.stored.clear()
    world.wire.stored[middle] = kept
    other = elsewhere(world)
    other.wire.lose = ["lookup"]
    request = started(other, FakeRequest("r", prompt(3 * BLOCK)))
    other.compute(request, 3 * BLOCK)
    for _ in range(8):
        other.plan([request])
        other.now += RETRY_S
    assert len(other.copied) == 2
    assert other.half.num_stored_tokens(request.request_id) == 3 * BLOCK


# --- lifetime of blocks -----------------------------------------------------------------------------------------------


def copying(world: World, *, chunks: int = 1) -> tuple[FakeRequest, list[StoreJob]]:
    """A request with copies under way that no worker has answered."""
    world.hold_reports = True
    request = started(world, FakeRequest("r", prompt(chunks * BLOCK)))
    for _ in range(chunks):
        world.compute(request, BLOCK)
    jobs: list[StoreJob] = []
    for _ in range(3):
        jobs += world.plan([request]).stores
    assert jobs
    return request, jobs


def sources(jobs: Sequence[StoreJob]) -> set[int]:
    return {block for job in jobs for part in job.object.blocks for block in part}


@pytest.mark.parametrize("group", [STATE, WINDOW], ids=["state", "window"])
def test_block_that_a_running_request_gives_up_is_held_until_its_copy_was_answered(group: Group) -> None:
    """H10, R8, R37, R38: states and windows of a running request are freed about two steps after they were written."""
    world = World((FULL, group))
    request, jobs = copying(world)
    given_up = request.table[1, 0]
    assert given_up.block_id in sources(jobs)
    request.blocks.remove(given_up)
    world.pool.unpin([given_up])
    for _ in range(4):
        world.plan([request])
        assert given_up.ref_cnt == 1
        assert given_up not in world.pool.free
    world.report()
    assert given_up.ref_cnt == 0
    assert world.pool.free.count(given_up) == 1


def test_preemption_under_a_copy_hands_none_of_its_blocks_to_another_request() -> None:
    """R35, H33, S9: no flush and no deadline for one; the blocks just are not free."""
    world = World(blocks=12)
    world.pool.reuses_at_once = True
    request, jobs = copying(world)
    preempt(world, request)
    taken = [world.pool.take() for _ in range(len(world.pool.free))]
    assert sources(jobs).isdisjoint(block.block_id for block in taken)
    world.report()
    assert world.half.pinned_blocks == 0
    assert sources(jobs) == {block.block_id for block in world.pool.free}


def test_answers_for_a_request_before_and_after_its_preemption_are_told_apart() -> None:
    """R36, R45, H2: jobs have numbers of their own; an early answer ends its own job only."""
    world = World((FULL,))
    request, first = copying(world)
    preempt(world, request)
    request.token_ids += prompt(BLOCK, seed=4)
    request.num_prompt_tokens = len(request.token_ids)
    for block in world.pool.blocks:
        world.pool.uncache(block)
    assert world.matched(request) == 0
    world.admit(request, 0)
    world.compute(request, BLOCK)
    world.compute(request, BLOCK)
    second: list[StoreJob] = []
    for _ in range(3):
        second += world.plan([request]).stores
    assert {job.job_id for job in first}.isdisjoint(job.job_id for job in second)
    assert second
    held = {block.block_id for block in world.pool.blocks if block.ref_cnt}
    assert sources(first) | sources(second) <= held
    world.half.reported(StepReport(jobs=tuple(JobReport(job.job_id, 0, JobOutcome.DONE) for job in first)))
    still = {block.block_id for block in world.pool.blocks if block.ref_cnt > 1}
    assert sources(second) <= still
    assert sources(first).isdisjoint(block.block_id for block in world.pool.blocks if block.ref_cnt)


def test_failure_of_one_store_is_not_covered_by_the_success_of_the_next() -> None:
    """H1, H2, R33, R34: two stores of one request, the first fails, the second is answered first."""
    world = World((FULL,), call_bytes=1)
    request, jobs = copying(world, chunks=2)
    first, second = jobs
    world.running = []
    world.half.reported(StepReport(jobs=(JobReport(second.job_id, 0, JobOutcome.DONE),)))
    world.hold_reports = False
    world.plan([request])
    assert world.half.has_pending_work
    assert world.half.num_stored_tokens(request.request_id) == 0
    world.half.reported(StepReport(jobs=(JobReport(first.job_id, 0, JobOutcome.COPY_FAILED),)))
    assert world.half.num_stored_tokens(request.request_id) == 0
    assert len(world.wire.stored) == 1


def test_store_and_load_of_one_request_may_be_under_way_together() -> None:
    """R45: preempted with a store open, it comes back with a hit."""
    world = elsewhere(holding(4 * BLOCK, FULL), [FULL])
    world.wire.evict(keep=3)
    request, jobs = FakeRequest("r", prompt(4 * BLOCK + 1)), []
    assert world.matched(request) == 3 * BLOCK
    world.admit(request, 3 * BLOCK)
    world.plan()
    request.num_computed_tokens = 3 * BLOCK
    world.compute(request, BLOCK)
    world.hold_reports = True
    for _ in range(3):
        jobs += world.plan([request]).stores
    assert len(jobs) == 1
    preempt(world, request)
    assert world.matched(request) == 3 * BLOCK
    world.admit(request, 3 * BLOCK)
    (load,) = world.plan().loads
    assert world.report() == set()
    world.hold_reports = False
    assert isinstance(load, LoadJob)
    world.finish(request)
    world.settle()
    world.check_idle()


# --- loads: failed once, told once, not tried again -------------------------------------------------------------------


def test_preempted_request_whose_load_failed_is_never_promised_anything_again() -> None:
    """H18, R57: preempted, hit, failed, preempted again, as often as vLLM likes."""
    world = elsewhere(holding(3 * BLOCK))
    request = FakeRequest("r", prompt(3 * BLOCK + 1))
    started_at = world.matched(request)
    assert started_at == 3 * BLOCK
    world.admit(request, 0)
    preempt(world, request)
    assert world.matched(request) == 3 * BLOCK
    world.outcome = JobOutcome.BAD_CHECKSUM
    world.admit(request, 3 * BLOCK)
    world.plan()
    world.outcome = JobOutcome.DONE
    lookups = sum(entry.startswith("lookup") for entry in world.wire.log)
    for _ in range(4):
        preempt(world, request)
        assert world.matched(request) == 0
        world.admit(request, 0)
    assert sum(entry.startswith("lookup") for entry in world.wire.log) == lookups


@pytest.mark.parametrize("answers", range(4))
def test_lookup_that_stops_answering_at_any_moment_is_a_miss_within_its_deadline(answers: int) -> None:
    """R48, R53, H16: the server says nothing any more after so many answers."""
    world = elsewhere(holding(3 * BLOCK))
    request = FakeRequest("r", prompt(3 * BLOCK + 1))
    for _ in range(answers):
        assert world.half.matched_tokens(request, 0) in (None, 3 * BLOCK)
    world.wire.held_back = True
    answer = world.half.matched_tokens(request, 0)
    assert answer in (None, 3 * BLOCK)
    world.now += 3.1
    answer = world.half.matched_tokens(request, 0)
    assert answer == 0 or (answers == 3 and answer == 3 * BLOCK), "a promise stands on what was answered before"
    world.wire.held_back = False
    world.finish(request)
    world.settle()
    world.check_idle()


def test_request_that_queues_for_longer_than_its_locks_live_is_looked_up_again_or_computed() -> None:
    """R61: the server takes locks back after five minutes, and evicts."""
    world = elsewhere(holding(3 * BLOCK))
    request = FakeRequest("r", prompt(3 * BLOCK + 1))
    assert world.matched(request) == 3 * BLOCK
    world.now += 301
    world.wire.locks.clear()
    world.wire.stored.clear()
    assert world.matched(request) == 0
    world.admit(request, 0)
    assert world.plan().loads == ()


def test_engine_keeps_stepping_until_a_load_that_failed_was_told() -> None:
    """R54: nothing else is scheduled; without a step the worker could not say that the load failed."""
    world = World()
    request = FakeRequest("r", prompt(2 * BLOCK))
    world.half.allocated(request, 2 * BLOCK, [[1, 2], [0, 3]])
    assert world.half.has_pending_work
    world.hold_reports = True
    world.plan()
    assert world.half.has_pending_work
    assert world.report(outcome=JobOutcome.STALE_EPOCH) == {request.request_id}
    assert not world.half.has_pending_work


def test_mistake_of_our_own_at_an_allocation_is_a_failed_load_and_no_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    """R46, R54: vLLM waits for a load by then; an exception would end the engine, and silence hang the request."""
    world = World()
    request = FakeRequest("r", prompt(2 * BLOCK))
    assert world.half._live is not None
    monkeypatch.setattr(world.half._live.hits, "admitted", None)
    world.half.allocated(request, 2 * BLOCK, [[1, 2], [0, 3]])
    assert world.half.has_pending_work
    world.hold_reports = True
    (job,) = world.plan().loads
    assert (job.request_id, job.objects) == (request.request_id, ())
    assert world.half.has_pending_work
    assert world.report(outcome=JobOutcome.STALE_EPOCH) == {request.request_id}
    assert not world.half.has_pending_work
    assert world.matched(request) == 0


def test_request_that_never_ran_leaves_nothing_and_is_reported_nowhere() -> None:
    """R69, H28: aborted while it waited."""
    world = World()
    request = FakeRequest("r", prompt(3 * BLOCK))
    assert world.matched(request) == 0
    world.finish(request)
    assert not world.half.has_pending_work
    assert world.plan().stores == ()
    world.finish(request)  # and once more, by an id that nobody knows any longer
    world.check_idle()


def test_locks_of_an_object_that_two_ranks_read_are_kept_until_both_have_it() -> None:
    """R73: one reader on the server, whatever the number of ranks and stages."""
    world = elsewhere(holding(2 * BLOCK, FULL, ranks=4), ranks=4)
    world.hold_reports = True
    request = FakeRequest("r", prompt(2 * BLOCK + 1))
    assert world.matched(request) == 2 * BLOCK
    world.admit(request, 2 * BLOCK)
    world.plan()
    for rank in range(3):
        world.report(ranks=[rank])
        assert set((+world.wire.locks).values()) == {1}
    world.report(ranks=[3])
    assert not +world.wire.locks
