"""Deliberate mistakes, each caught by name: a check that lets its mutant live is no check.

A mutant is a patch of one decision; its victim is the test that must fail while the patch is in. Mutants of the worker
half are in `test_worker_mutants.py`.
"""

from __future__ import annotations

import importlib.util
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lmcache_mp_safe.errors import SafeError
from lmcache_mp_safe.geometry.payload import ObjectLayout
from lmcache_mp_safe.scheduler import certify, half, hits, machine, objects, stores
from lmcache_mp_safe.testing import world
from lmcache_mp_safe.testing.fake_server import SharedMemory
from lmcache_mp_safe.testing.pools import pool_file
from lmcache_mp_safe.testing.world import BLOCK
from lmcache_mp_safe.wire import wire

UNIT = Path(__file__).parents[1] / "unit"


def module(name: str) -> ModuleType:
    path = UNIT / name
    spec = importlib.util.spec_from_file_location(f"victims_{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


STORES, HITS = module("scheduler/test_stores.py"), module("scheduler/test_hits.py")
WIRE, DEBTS = module("wire/test_wire.py"), module("wire/test_debts.py")

Patch = Callable[[pytest.MonkeyPatch], None]


# --- the mistakes -----------------------------------------------------------------------------------------------------


def store_by_table_position(patch: pytest.MonkeyPatch) -> None:
    """Take the block in the request's table instead of the one that the pool serves for the hash."""

    def by_position(pool: Any, source: Any, geometry: Any, columns: Any) -> certify.Certificate:
        pages = [
            certify.Page(group, None, source.table[group, column], source.table[group, column].block_hash)
            for group, part in enumerate(columns)
            for column in part
        ]
        return certify.Certificate(tuple(pages), len(columns))

    patch.setattr(stores, "certify", by_position)
    patch.setattr(stores, "still_holds", lambda *_: True)


def verified_length_from_scheduled_tokens(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stores, "verified_tokens", lambda source: source.num_computed_tokens + BLOCK)


def no_pin(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(certify.Pins, "try_pin", lambda self, certificate: True)
    patch.setattr(certify.Pins, "unpin", lambda self, certificate: None)


def copy_in_the_plan_of_first_sight(patch: pytest.MonkeyPatch) -> None:
    dispatch = stores.Stores._dispatch

    def eager(self: Any, run: Any, plan_number: int, now: float) -> Any:
        jobs = dispatch(self, run, plan_number, now)
        return jobs or (dispatch(self, run, plan_number, now) if run.state is stores.RunState.RESERVED else jobs)

    patch.setattr(stores.Stores, "_dispatch", eager)


def id_swapped_at_the_second_look(patch: pytest.MonkeyPatch) -> None:
    def swapped(pool: Any, certificate: Any) -> bool:
        for group, pages in enumerate(certificate.groups):
            found = pool.find_all(pages.prefix_hashes, group)
            if found is not None:
                object.__setattr__(pages, "blocks", found)
        return True

    patch.setattr(stores, "still_holds", swapped)


def watermark_on_lookup(patch: pytest.MonkeyPatch) -> None:
    ask = half.SchedulerHalf._matched_tokens

    def advancing(self: Any, source: Any, local_tokens: int) -> int | None:
        tokens = ask(self, source, local_tokens)
        self._book[source.request_id].prefix.progress.num_stored_tokens = tokens or 0
        return tokens

    patch.setattr(half.SchedulerHalf, "_matched_tokens", advancing)


def watermark_over_a_gap(patch: pytest.MonkeyPatch) -> None:
    def highest(self: Any, chunk: int, chunk_tokens: int) -> None:
        self.num_stored_tokens = max(self.num_stored_tokens, (chunk + 1) * chunk_tokens)

    patch.setattr(stores.Progress, "acknowledge", highest)


def promise_without_the_boundary_object(patch: pytest.MonkeyPatch) -> None:
    make = half.Rules
    patch.setattr(half, "Rules", lambda **fields: replace(make(**fields), needs_boundary=lambda boundary: False))


def promise_without_reading_the_seals(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(hits.Hits, "_seals_are_right", lambda *_: True)


def seals_of_any_namespace(patch: pytest.MonkeyPatch) -> None:
    for module in (objects, world):
        patch.setattr(module, "layout_in", lambda namespace, layout_digest: layout_digest)


def load_again_after_a_failed_load(patch: pytest.MonkeyPatch) -> None:
    decide = machine._decide

    def forgiving(record: Any, event: Any, rules: Any) -> Any:
        outcome = decide(record, event, rules)
        return replace(outcome, record=replace(outcome.record, may_load=True, phase=_again(outcome.record)))

    def _again(record: Any) -> Any:
        failed = record.phase is machine.Phase.MISSED and not record.may_load
        return machine.Phase.NEW if failed else record.phase

    patch.setattr(machine, "_decide", forgiving)
    missed = (machine.Phase.LOADING, machine.LoadFailed)
    patch.setattr(machine, "MOVES", {**machine.MOVES, missed: frozenset({machine.Phase.NEW})})


def locks_kept_after_an_abort(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(machine, "_releases", lambda record: ())


def unpin_when_the_first_rank_has_answered(patch: pytest.MonkeyPatch) -> None:
    reported = half.SchedulerHalf.reported

    def hasty(self: Any, report: Any) -> Any:
        ranks, self._ranks = self._ranks, self._ranks[:1]
        try:
            return reported(self, report)
        finally:
            self._ranks = ranks

    patch.setattr(half.SchedulerHalf, "reported", hasty)


def shared_pages_are_written(patch: pytest.MonkeyPatch) -> None:
    targets = hits.Hits._targets

    def all_pages(self: Any, hit: Any, name: Any, blocks: Any) -> Any:
        record, hit.record = hit.record, replace(hit.record, local_tokens=0)
        try:
            return targets(self, hit, name, blocks)
        finally:
            hit.record = record

    patch.setattr(hits.Hits, "_targets", all_pages)


def one_session_id_for_two_sequences(patch: pytest.MonkeyPatch) -> None:
    opened = wire.Wire.open

    def reusing(self: Any, digests: Any, salt: str = "") -> Any:
        number = opened(self, digests, salt)
        self._sessions[number].name = f"{self._process}-1"
        return number

    patch.setattr(wire.Wire, "open", reusing)


def free_after_a_failed_retrieve(patch: pytest.MonkeyPatch) -> None:
    take = wire.Wire._take_retrieve

    def generous(self: Any, link: Any, call: Any, answer: Any, session: Any, now: float) -> None:
        if not answer.success and session is not None:
            session.locked.append(range(call.start, call.end))
        take(self, link, call, answer, session, now)

    patch.setattr(wire.Wire, "_take_retrieve", generous)


def commit_after_the_lease(patch: pytest.MonkeyPatch) -> None:
    taken = wire.Wire._send

    def undying(self: Any, link: Any, kind: Any, session: Any, future: Any, now: float, **fields: Any) -> Any:
        call = taken(self, link, kind, session, future, now, **fields)
        call.sent = now + 1e9
        return call

    patch.setattr(wire.Wire, "_send", undying)


def end_of_a_session_before_its_commit(patch: pytest.MonkeyPatch) -> None:
    settle = wire.Wire._settle_closing

    def hasty(self: Any, link: Any, now: float) -> None:
        for session in self._closing.values():
            session.running.clear()
        settle(self, link, now)

    patch.setattr(wire.Wire, "_settle_closing", hasty)


def no_last_question(patch: pytest.MonkeyPatch) -> None:
    def give_up(self: Any, link: Any, call: Any, now: float) -> None:
        self._assume_done(link, call, now)
        self._forget(link, call)

    patch.setattr(wire.Wire, "_give_up_lookup", give_up)


def debts_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(wire.Wire, "_inherit", lambda *_: None)


# --- who must notice --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    patch: Patch
    victim: Callable[..., None]
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return self.patch.__name__


def mutant(patch: Patch, victim: Callable[..., None], **arguments: Any) -> Mutant:
    return Mutant(patch, victim, arguments)


MUTANTS = [
    mutant(store_by_table_position, STORES.test_only_states_that_vllm_itself_would_serve_are_stored),
    mutant(
        verified_length_from_scheduled_tokens,
        STORES.test_verified_tokens_end_before_anything_a_running_step_may_write,
        prompt_tokens=100,
        tokens=105,
        computed=108,
        verified=104,
    ),
    mutant(no_pin, STORES.test_source_blocks_stay_held_until_every_rank_has_answered),
    mutant(
        copy_in_the_plan_of_first_sight,
        STORES.test_second_look_that_finds_another_block_starts_over_with_the_new_one,
    ),
    mutant(
        id_swapped_at_the_second_look,
        STORES.test_second_look_that_finds_another_block_starts_over_with_the_new_one,
    ),
    mutant(watermark_on_lookup, STORES.test_lookup_hit_does_not_move_the_watermark),
    mutant(
        watermark_over_a_gap,
        STORES.test_out_of_order_acknowledgements_advance_over_the_contiguous_run_only,
    ),
    mutant(promise_without_the_boundary_object, HITS.test_without_any_boundary_object_nothing_is_promised),
    mutant(
        promise_without_reading_the_seals,
        HITS.test_object_whose_seal_is_wrong_is_a_miss_and_mended_by_the_recompute,
    ),
    mutant(seals_of_any_namespace, HITS.test_object_of_the_same_tokens_from_another_namespace_is_a_miss),
    mutant(
        load_again_after_a_failed_load,
        HITS.test_object_that_arrives_wrong_is_recomputed_not_loaded_again_and_mended,
    ),
    mutant(locks_kept_after_an_abort, HITS.test_abort_at_any_moment_of_the_lookup_releases_everything, polls=4),
    mutant(unpin_when_the_first_rank_has_answered, STORES.test_source_blocks_stay_held_until_every_rank_has_answered),
    mutant(shared_pages_are_written, HITS.test_pages_shared_with_other_requests_are_never_written),
    mutant(one_session_id_for_two_sequences, WIRE.test_no_two_sessions_share_a_server_session),
    mutant(
        free_after_a_failed_retrieve,
        WIRE.test_close_during_a_retrieve_that_fails_neither_commits_nor_frees_its_locks,
    ),
    mutant(commit_after_the_lease, WIRE.test_commit_after_the_lease_is_refused_here),
    mutant(
        debts_are_forgotten,
        WIRE.test_what_was_owed_to_a_server_that_stood_still_is_settled_when_it_goes_on,
        state="reading",
    ),
    mutant(
        no_last_question,
        DEBTS.test_nothing_is_left_on_a_server_that_failed_at_any_call_and_goes_on,
        operation="query_prefetch_status",
        fault="lose_at idle_at",
        lookup_s=0.15,
    ),
    mutant(end_of_a_session_before_its_commit, WIRE.test_close_waits_for_a_commit_before_it_ends),
]


@pytest.fixture
def segment_file(tmp_path: Path) -> Any:
    """What victims of the wire layer open as the server's pool."""
    with pool_file(WIRE.POOL, ObjectLayout.for_payload([WIRE.OBJECT - 4096])) as made:
        yield Path("/dev/shm") / made.name


@pytest.fixture
def memory() -> Iterator[SharedMemory]:
    made = SharedMemory(64 * DEBTS.OBJECT)
    yield made
    made.close()


@pytest.fixture
def fixtures(segment_file: Path, memory: SharedMemory) -> dict[str, Callable[[], Any]]:
    """Fixtures that victims ask for by name."""
    return {
        "segment": lambda: segment_file,
        "bench": lambda: WIRE.Bench(segment_file),
        "life": lambda: DEBTS.Life(memory),
    }


def run_victim(chosen: Mutant, fixtures: dict[str, Callable[[], Any]]) -> None:
    wanted = inspect.signature(chosen.victim).parameters
    given = {name: make() for name, make in fixtures.items() if name in wanted}
    chosen.victim(**given, **chosen.arguments)


@pytest.mark.parametrize("chosen", MUTANTS, ids=str)
def test_victim_is_content_without_the_mutant(chosen: Mutant, fixtures: Any) -> None:
    run_victim(chosen, fixtures)


@pytest.mark.parametrize("chosen", MUTANTS, ids=str)
def test_mutant_is_caught(chosen: Mutant, fixtures: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # The victims of `verified_tokens` import it by name.
    chosen.patch(monkeypatch)
    if chosen.patch is verified_length_from_scheduled_tokens:
        monkeypatch.setattr(STORES, "verified_tokens", stores.verified_tokens)
    with pytest.raises((AssertionError, pytest.fail.Exception, SafeError)):
        run_victim(chosen, fixtures)
