"""One request's machine under any order of events: illegal ones change nothing, locks balance, a promise is checked."""

from __future__ import annotations

from typing import Any

import hypothesis
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from lmcache_mp_safe.errors import LocalError
from lmcache_mp_safe.ids import RequestId
from lmcache_mp_safe.metrics.counts import Miss
from lmcache_mp_safe.scheduler import effects, machine, phases
from lmcache_mp_safe.scheduler.machine import Outcome, RequestRecord, Rules
from lmcache_mp_safe.scheduler.phases import MOVES, Event, Phase

BLOCK, CHUNK = 4, 8

MODELS = {
    "hybrid": Rules(CHUNK, BLOCK, has_chunks=True, needs_boundary=lambda b: True, max_probes=3),
    "attention": Rules(CHUNK, BLOCK, has_chunks=True, needs_boundary=lambda b: b % CHUNK != 0, max_probes=2),
    "states only": Rules(CHUNK, BLOCK, has_chunks=False, needs_boundary=lambda b: True, max_probes=3),
}

BOUNDARIES = st.integers(0, 12).map(lambda blocks: blocks * BLOCK)
EVENTS: st.SearchStrategy[Event] = st.one_of(
    BOUNDARIES.map(phases.Polled),
    st.integers(0, 6).map(phases.ChunksCounted),
    st.builds(phases.Probed, BOUNDARIES, st.booleans()),
    st.sampled_from([Miss.LATE, Miss.BAD_SEAL]).map(phases.Unusable),
    *[
        st.just(kind())
        for kind in (
            phases.Validated,
            phases.Admitted,
            phases.AdmittedWithoutLoad,
            phases.AdmittedOtherwise,
            phases.Loaded,
            phases.LoadFailed,
            phases.Expired,
            phases.EpochEnded,
            phases.Finished,
        )
    ],
)


class RequestMachine(RuleBasedStateMachine):
    """Feeds events to `step` and keeps the books that the effects are about.

    `holds`: the request has asked for locks that nobody gave back. `loading`: a load job holds them instead.
    """

    def __init__(self) -> None:
        super().__init__()
        self.record = RequestRecord(RequestId("r"))
        self.rules = MODELS["hybrid"]
        self.holds = self.loading = self.checked = self.failed_once = False
        self.loads = self.ends = 0

    @initialize(model=st.sampled_from(sorted(MODELS)), limit=BOUNDARIES)
    def start(self, model: str, limit: int) -> None:
        self.rules = MODELS[model]
        self.record = RequestRecord(RequestId("r"), limit_tokens=limit)

    @rule(event=EVENTS)
    def something_happens(self, event: Event) -> None:
        self.feed(event)

    @rule(data=st.data(), exists=st.booleans())
    def life_goes_on(self, data: st.DataObject, exists: bool) -> None:
        """What would come next without trouble, so that deep phases are reached often."""
        if self.record.phase is Phase.ENDED:
            return
        if self.record.phase is Phase.LOOKING_UP:
            self.feed(phases.ChunksCounted(data.draw(st.integers(0, self.record.limit_tokens // CHUNK))))
        elif self.record.phase is Phase.PROBING:
            boundary = data.draw(st.sampled_from(sorted(self.record.waiting_for)))
            self.feed(phases.Probed(boundary, exists))
        elif self.record.phase is Phase.HOLDING:
            self.feed(phases.Validated())
        elif self.record.phase is Phase.PROMISED:
            self.feed(phases.Admitted())
        elif self.record.phase is Phase.LOADING:
            self.feed(phases.Loaded() if exists else phases.LoadFailed())
        elif self.record.phase is Phase.MISSED:
            self.feed(phases.AdmittedWithoutLoad())
        else:
            self.feed(phases.Polled(0))

    def feed(self, event: Event) -> None:
        before = self.record
        try:
            outcome = machine.step(before, event, self.rules)
        except LocalError:
            assert self.record == before
            unasked = isinstance(event, phases.Probed) and event.boundary not in before.waiting_for
            assert unasked or (before.phase, type(event)) not in MOVES
            return
        self.record = outcome.record
        if isinstance(event, phases.EpochEnded):
            self.holds = False  # the server took its locks with it
        if isinstance(event, phases.Loaded | phases.LoadFailed):
            self.loading = False
            self.ends += 1
            self.failed_once |= isinstance(event, phases.LoadFailed)
        for effect in outcome.effects:
            self.perform(effect)
        if isinstance(event, phases.Validated):
            self.checked = True
        if self.record.phase is not Phase.PROMISED:
            self.checked = False

    def perform(self, effect: effects.Effect) -> None:
        match effect:
            case effects.CountChunks():
                assert not self.holds, "a second lookup over locks that were not given back"
                self.holds = True
            case effects.Probe(boundaries=boundaries):
                assert boundaries
                self.holds = True
            case effects.Hold(first_chunk=first, boundary=boundary):
                assert self.holds
                assert first * CHUNK <= self.record.local_tokens < boundary
            case effects.Release():
                assert self.holds, "locks given back twice"
                self.holds = False
            case effects.Load():
                assert self.holds
                assert self.checked, "a load of what was never checked"
                assert not self.failed_once, "a second load after a failed one"
                self.holds, self.loading = False, True
                self.loads += 1
            case effects.RefuseLoad():
                self.loading = True
                self.loads += 1

    @invariant()
    def locks_are_held_exactly_where_the_phase_says(self) -> None:
        waits = self.record.phase in (Phase.PROBING, Phase.HOLDING, Phase.PROMISED)
        assert self.holds == (waits or self.record.phase is Phase.LOOKING_UP)

    @invariant()
    def load_ends_once(self) -> None:
        assert self.loads == self.ends + self.loading or self.record.phase is Phase.ENDED
        assert self.loading == (self.record.phase is Phase.LOADING) or self.record.phase is Phase.ENDED

    @invariant()
    def promise_is_checked_and_can_be_restored(self) -> None:
        promised = self.record.promised_tokens
        assert promised >= 0
        if not promised:
            return
        assert self.checked
        assert self.record.boundary % BLOCK == 0
        assert self.record.local_tokens < self.record.boundary <= self.record.limit_tokens
        if self.rules.has_chunks:
            assert self.record.boundary // CHUNK <= self.record.chunks_found


SETTINGS = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_any_order_of_events_keeps_the_books() -> None:
    run_state_machine_as_test(RequestMachine, settings=SETTINGS)


def no_release(outcome: Outcome) -> Outcome:
    return Outcome(outcome.record, tuple(e for e in outcome.effects if not isinstance(e, effects.Release)))


def release_twice(outcome: Outcome) -> Outcome:
    extra = [e for e in outcome.effects if isinstance(e, effects.Release)]
    return Outcome(outcome.record, (*outcome.effects, *extra))


def promise_unchecked(outcome: Outcome) -> Outcome:
    if outcome.record.phase is not Phase.HOLDING:
        return outcome
    return Outcome(machine.replace(outcome.record, phase=Phase.PROMISED), outcome.effects)


def load_again(outcome: Outcome) -> Outcome:
    return Outcome(machine.replace(outcome.record, may_load=True), outcome.effects)


@pytest.mark.parametrize("mistake", [no_release, release_twice, promise_unchecked, load_again])
def test_mistake_in_a_decision_is_caught(mistake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = machine.step
    monkeypatch.setattr(machine, "step", lambda record, event, rules: mistake(right(record, event, rules)))
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            RequestMachine,
            settings=settings(SETTINGS, database=None, derandomize=True, phases=[hypothesis.Phase.generate]),
        )
