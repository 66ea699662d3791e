"""What is taken from a tally adds up to what was counted, however it is taken and merged."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lmcache_mp_safe.metrics.counts import CopyTime, Count, Level
from lmcache_mp_safe.metrics.tally import Sample, Tally


def test_nothing_new_is_nothing_to_tell() -> None:
    tally = Tally()
    assert tally.take({}) is None
    tally.add(Count.LOOKUPS)
    assert tally.take({}) == Sample({"lookups": 1})
    assert tally.take({}) is None
    assert tally.totals["lookups"] == 1


def test_a_level_is_told_when_it_changes() -> None:
    tally = Tally()
    assert tally.take({Level.EPOCH: 1}) == Sample(levels={"epoch": 1})
    assert tally.take({Level.EPOCH: 1}) is None
    assert tally.take({Level.EPOCH: 2}) == Sample(levels={"epoch": 2})


def test_merging_adds_sums_joins_times_and_keeps_the_later_level() -> None:
    first = Sample({"hits": 2}, {"copy:load": [0.5]}, {"epoch": 1, "server_up": 1})
    second = Sample({"hits": 3, "probes": 1}, {"copy:load": [0.25]}, {"epoch": 2})
    merged = Sample({"hits": 5, "probes": 1}, {"copy:load": [0.5, 0.25]}, {"epoch": 2, "server_up": 1})
    assert first.merged(second) == merged
    assert first == Sample({"hits": 2}, {"copy:load": [0.5]}, {"epoch": 1, "server_up": 1}), "the first was changed"


@given(st.lists(st.one_of(st.sampled_from([Count.HITS, Count.PROBES, CopyTime.LOAD]), st.none()), max_size=40))
def test_samples_of_any_intervals_add_up_to_the_totals(actions: list[Count | CopyTime | None]) -> None:
    """None takes a sample; everything else counts."""
    tally, merged = Tally(), Sample()
    for action in [*actions, None]:
        if action is None:
            merged = merged.merged(tally.take({}) or Sample())
        elif isinstance(action, CopyTime):
            tally.observe(action, 0.1)
        else:
            tally.add(action, 2)
    assert merged.sums == {key: 2 * actions.count(key) for key in (Count.HITS, Count.PROBES) if key in actions}
    assert len(merged.times.get("copy:load", [])) == actions.count(CopyTime.LOAD)
