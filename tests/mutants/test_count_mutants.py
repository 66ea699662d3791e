"""Deliberate mistakes in counting, each caught: a figure that counts twice, or is told twice, is a wrong figure."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lmcache_mp_safe.metrics import tally
from lmcache_mp_safe.metrics.counts import Count, Miss
from lmcache_mp_safe.metrics.tally import Sample, Tally
from lmcache_mp_safe.scheduler import hits, verdicts

UNIT = Path(__file__).parents[1] / "unit"
Patch = Callable[[pytest.MonkeyPatch], None]


def module(name: str) -> ModuleType:
    path = UNIT / name
    spec = importlib.util.spec_from_file_location(f"counted_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


victims, tallies = module("scheduler/test_counts.py"), module("metrics/test_tally.py")


def counts_twice(key: StrEnum) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        add = Tally.add

        def twice(self: Tally, counted: StrEnum, amount: float = 1) -> None:
            add(self, counted, 2 * amount if counted == key else amount)

        monkeypatch.setattr(Tally, "add", twice)

    return patch


def every_question_is_a_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    decide = verdicts.verdict

    def eager(before: Any, event: Any, after: Any) -> Any:
        told = decide(before, event, after)
        return verdicts.Verdict(told.begun or isinstance(event, hits.phases.Polled), told.end)

    monkeypatch.setattr(hits, "verdict", eager)


def told_again_with_the_next_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(self: Tally, levels: Any) -> Sample | None:
        return Sample(dict(self.totals), {}, {}) if self.totals else None

    monkeypatch.setattr(Tally, "take", take)


def the_other_is_merged_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    merged = tally.Sample.merged
    monkeypatch.setattr(tally.Sample, "merged", lambda self, later: merged(merged(self, later), later))


HIT = victims.test_a_hit_is_counted_once_however_often_vllm_asks
STORED = victims.test_stored_tokens_and_bytes_are_those_of_the_acknowledged_objects_of_all_ranks
MISS = victims.test_every_miss_has_its_reason_and_is_counted_once
TWICE: list[tuple[StrEnum, Callable[[], None]]] = [
    *[(key, HIT) for key in (Count.LOOKUPS, Count.HITS, Count.PROMISED_TOKENS, Count.PROMISED_BYTES)],
    *[(key, HIT) for key in (Count.LOADED_TOKENS, Count.LOADED_BYTES)],
    *[(key, STORED) for key in (Count.OBJECTS_STORED, Count.STORED_TOKENS, Count.STORED_BYTES)],
    *[(reason, lambda reason=reason: MISS(reason)) for reason in Miss],
    (Count.BYPASS_SECONDS, victims.test_time_without_a_server_is_counted_from_step_to_step),
    (Count.LOADS_FAILED, victims.test_a_load_that_failed_brought_no_tokens),
]
OTHERS: list[tuple[Patch, Callable[[], None]]] = [
    (every_question_is_a_lookup, HIT),
    (told_again_with_the_next_sample, victims.test_samples_add_up_to_the_counters),
    (told_again_with_the_next_sample, tallies.test_nothing_new_is_nothing_to_tell),
    (the_other_is_merged_twice, tallies.test_merging_adds_sums_joins_times_and_keeps_the_later_level),
    (the_other_is_merged_twice, victims.test_samples_add_up_to_the_counters),
]


@pytest.mark.parametrize(("key", "victim"), TWICE, ids=[str(key) for key, _ in TWICE])
def test_a_series_that_counts_twice_is_caught(
    key: StrEnum, victim: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    victim()
    counts_twice(key)(monkeypatch)
    with pytest.raises(AssertionError):
        victim()


@pytest.mark.parametrize(("patch", "victim"), OTHERS, ids=[f"{p.__name__}-{v.__name__}" for p, v in OTHERS])
def test_a_mistake_in_counting_is_caught(
    patch: Patch, victim: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    victim()
    patch(monkeypatch)
    with pytest.raises(AssertionError):
        victim()
