"""Every cell of the table of moves, and the decisions behind the ones that branch."""

from __future__ import annotations

import itertools

import pytest

from lmcache_mp_safe.errors import LocalError
from lmcache_mp_safe.ids import RequestId
from lmcache_mp_safe.metrics.counts import Miss
from lmcache_mp_safe.scheduler import phases
from lmcache_mp_safe.scheduler.effects import CountChunks, Hold, Load, Probe, RefuseLoad, Release
from lmcache_mp_safe.scheduler.machine import PROBE_WAVE, RequestRecord, Rules, step
from lmcache_mp_safe.scheduler.phases import MOVES, Event, Phase

BLOCK, CHUNK = 100, 200

HYBRID = Rules(CHUNK, BLOCK, has_chunks=True, needs_boundary=lambda b: True, max_probes=16)
ATTENTION = Rules(CHUNK, BLOCK, has_chunks=True, needs_boundary=lambda b: b % CHUNK != 0, max_probes=2)
NO_CHUNKS = Rules(CHUNK, BLOCK, has_chunks=False, needs_boundary=lambda b: True, max_probes=4)

EVENTS: list[Event] = [
    phases.Polled(0),
    phases.ChunksCounted(1),
    phases.Probed(300, exists=True),
    phases.Validated(),
    phases.Unusable(Miss.LATE),
    phases.Admitted(),
    phases.AdmittedWithoutLoad(),
    phases.AdmittedOtherwise(),
    phases.Loaded(),
    phases.LoadFailed(),
    phases.Expired(),
    phases.Finished(),
    phases.EpochEnded(),
]


def record(phase: Phase, **fields: object) -> RequestRecord:
    made = RequestRecord(RequestId("r"), phase=phase, limit_tokens=500)
    base: dict[str, object] = {"waiting_for": frozenset({300})} if phase is Phase.PROBING else {}
    if phase in (Phase.HOLDING, Phase.PROMISED, Phase.LOADING):
        base |= {"boundary": 300, "chunks_found": 1}
    return RequestRecord(**{**made.__dict__, **base, **fields})  # type: ignore[arg-type]


def run(start: RequestRecord, *events: Event, rules: Rules = HYBRID) -> tuple[RequestRecord, list[object]]:
    """Feed events; returns the record and all effects."""
    effects: list[object] = []
    for event in events:
        outcome = step(start, event, rules)
        start = outcome.record
        effects += outcome.effects
    return start, effects


@pytest.mark.parametrize(
    ("phase", "event"), list(itertools.product(Phase, EVENTS)), ids=lambda v: getattr(v, "value", str(v))
)
def test_every_cell_leads_where_the_table_says_and_an_absent_one_changes_nothing(phase: Phase, event: Event) -> None:
    before = record(phase)
    allowed = MOVES.get((phase, type(event)))
    if allowed is None:
        with pytest.raises(LocalError):
            step(before, event, HYBRID)
        assert before == record(phase)
    else:
        assert step(before, event, HYBRID).record.phase in allowed


def test_every_phase_can_end_and_every_event_is_in_the_table() -> None:
    assert {phase for phase, event in MOVES if event is phases.Finished} == set(Phase) - {Phase.ENDED}
    assert {event for _, event in MOVES} == {type(event) for event in EVENTS}


def test_first_question_counts_the_chunks_that_a_hit_could_use() -> None:
    after, effects = run(record(Phase.NEW), phases.Polled(0))
    assert (after.phase, effects) == (Phase.LOOKING_UP, [CountChunks(2)])


def test_asking_again_while_undecided_changes_nothing() -> None:
    for phase in (Phase.LOOKING_UP, Phase.PROBING, Phase.HOLDING):
        after, effects = run(record(phase), *[phases.Polled(0)] * 5)
        assert after == record(phase)
        assert effects == []


def test_prompt_that_the_local_hit_covers_asks_nobody() -> None:
    after, effects = run(record(Phase.NEW), phases.Polled(500))
    assert (after.phase, effects) == (Phase.MISSED, [])


def test_short_prompt_is_probed_without_counting_chunks() -> None:
    after, effects = run(record(Phase.NEW, limit_tokens=100), phases.Polled(0))
    assert (after.phase, effects) == (Phase.PROBING, [Probe((100,))])


def test_hybrid_probes_from_the_last_block_below_the_next_chunk_downwards() -> None:
    _, effects = run(record(Phase.LOOKING_UP), phases.ChunksCounted(1))
    assert effects == [Probe((300, 200, 100))]


def test_boundary_beyond_the_chunks_that_exist_is_never_probed() -> None:
    _, effects = run(record(Phase.LOOKING_UP), phases.ChunksCounted(0))
    assert effects == [Probe((100,))]


def test_deepest_boundary_object_wins_whatever_the_order_of_answers() -> None:
    for order in itertools.permutations([(300, False), (200, True), (100, True)]):
        after = record(Phase.PROBING, chunks_found=1, waiting_for=frozenset({100, 200, 300}))
        effects: list[object] = []
        for boundary, exists in order:
            if after.phase is not Phase.PROBING:
                break
            after, more = run(after, phases.Probed(boundary, exists))
            effects += more
        assert (after.boundary, effects) == (200, [Hold(0, 200)])


def test_hit_is_not_promised_without_its_boundary_object() -> None:
    start = record(Phase.PROBING, chunks_found=2, waiting_for=frozenset({500, 400}))
    after, effects = run(start, phases.Probed(500, exists=False), phases.Probed(400, exists=False))
    assert (after.phase, effects) == (Phase.MISSED, [Release()])


def test_attention_only_hit_needs_no_boundary_object_at_a_chunk_end() -> None:
    after, effects = run(record(Phase.LOOKING_UP, limit_tokens=400), phases.ChunksCounted(2), rules=ATTENTION)
    assert (after.phase, after.boundary, effects) == (Phase.HOLDING, 400, [Hold(0, 400)])


def test_attention_only_tail_is_taken_when_it_exists_and_the_chunks_alone_otherwise() -> None:
    for exists, boundary in ((True, 500), (False, 400)):
        after, _ = run(record(Phase.LOOKING_UP), phases.ChunksCounted(2), phases.Probed(500, exists), rules=ATTENTION)
        assert (after.phase, after.boundary) == (Phase.HOLDING, boundary)


def test_model_without_chunk_objects_only_probes() -> None:
    _, effects = run(record(Phase.NEW), phases.Polled(0), rules=NO_CHUNKS)
    assert effects == [Probe((500, 400, 300, 200))]


def test_probes_come_in_waves_and_end_at_the_limit() -> None:
    rules = Rules(CHUNK, BLOCK, has_chunks=True, needs_boundary=lambda b: True, max_probes=10)
    current, effects = run(record(Phase.LOOKING_UP, limit_tokens=5000), phases.ChunksCounted(25), rules=rules)
    probed: list[int] = []
    while current.phase is Phase.PROBING:
        (wave,) = [effect for effect in effects if isinstance(effect, Probe)]
        assert len(wave.boundaries) <= PROBE_WAVE
        probed += wave.boundaries
        current, effects = run(
            current, *[phases.Probed(boundary, exists=False) for boundary in wave.boundaries], rules=rules
        )
    assert probed == [5000 - 100 * i for i in range(10)]
    assert current.phase is Phase.MISSED


def test_remembered_boundaries_are_probed_beyond_the_limit_on_probes() -> None:
    rules = Rules(CHUNK, BLOCK, has_chunks=True, needs_boundary=lambda b: True, max_probes=1)
    start = record(Phase.LOOKING_UP, remembered=(100,))
    _, effects = run(start, phases.ChunksCounted(2), rules=rules)
    assert effects == [Probe((100, 500))]


def test_promise_shrinks_and_grows_with_the_local_hit() -> None:
    promised = record(Phase.PROMISED)
    for local in (0, 100, 200):
        after, effects = run(promised, phases.Polled(local))
        assert (after.promised_tokens, effects) == (300 - local, [])


def test_promise_that_the_local_hit_has_overtaken_is_released() -> None:
    after, effects = run(record(Phase.PROMISED), phases.Polled(300))
    assert (after.phase, after.promised_tokens, effects) == (Phase.MISSED, 0, [Release()])


def test_promise_is_nothing_where_the_local_hit_grew_past_it_while_seals_were_read() -> None:
    after, _ = run(record(Phase.HOLDING), phases.Polled(400), phases.Validated())
    assert (after.phase, after.promised_tokens) == (Phase.PROMISED, 0)
    after, effects = run(after, phases.Polled(400))
    assert (after.phase, effects) == (Phase.MISSED, [Release()])


def test_promise_whose_local_part_was_evicted_is_looked_up_afresh() -> None:
    start = record(Phase.PROMISED, first_chunk=1, local_tokens=200)
    after, effects = run(start, phases.Polled(100))
    assert (after.phase, effects) == (Phase.LOOKING_UP, [Release(), CountChunks(2)])


def test_expired_promise_is_released_before_it_is_looked_up_again() -> None:
    after, effects = run(record(Phase.PROMISED), phases.Expired(), phases.Polled(0))
    assert (after.phase, effects) == (Phase.LOOKING_UP, [Release(), CountChunks(2)])


def test_admission_loads_or_releases_or_refuses_exactly_once() -> None:
    for event, expected in (
        (phases.Admitted(), [Load()]),
        (phases.AdmittedWithoutLoad(), [Release()]),
        (phases.AdmittedOtherwise(), [Release(), RefuseLoad()]),
    ):
        _, effects = run(record(Phase.PROMISED), event)
        assert effects == expected


def test_second_admission_with_nothing_to_load_owes_nothing() -> None:
    after, effects = run(record(Phase.LOADING), phases.Loaded(), phases.AdmittedWithoutLoad())
    assert (after.phase, effects) == (Phase.COMPUTING, [])


def test_request_whose_load_failed_never_loads_again_also_after_preemption() -> None:
    after, effects = run(record(Phase.LOADING), phases.LoadFailed(), phases.Polled(0), phases.AdmittedWithoutLoad())
    assert (after.phase, effects) == (Phase.COMPUTING, [])
    for _ in range(4):
        after, effects = run(after, phases.Polled(0), phases.AdmittedWithoutLoad())
        assert (after.phase, effects) == (Phase.COMPUTING, [])


def test_preempted_request_is_looked_up_over_what_it_has_by_now() -> None:
    after, effects = run(record(Phase.COMPUTING, limit_tokens=700), phases.Polled(0))
    assert (after.phase, effects) == (Phase.LOOKING_UP, [CountChunks(3)])


def test_abort_releases_exactly_what_the_request_itself_holds() -> None:
    for phase in Phase:
        if phase is Phase.ENDED:
            continue
        _, effects = run(record(phase), phases.Finished())
        holds = phase in (Phase.LOOKING_UP, Phase.PROBING, Phase.HOLDING, Phase.PROMISED)
        assert effects == ([Release()] if holds else [])


def test_nothing_is_released_on_a_server_that_is_gone() -> None:
    for phase in Phase:
        if phase is Phase.ENDED:
            continue
        _, effects = run(record(phase), phases.EpochEnded())
        assert effects == []
