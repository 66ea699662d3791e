"""The simulator notices mistakes: each of these is caught, by name, within a few seeds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lmcache_mp_safe.testing.sim.run import run_seed

sys.path.insert(0, str(Path(__file__).parent))

from mutants import MUTANTS, Mutant

SEEDS, STEPS = 3, 120

# Invariants that may notice a mistake. Those that are absent need more seeds than the fast suite has time for.
CAUGHT_BY = {
    "unpinned_when_dispatched": "block",
    "pins_are_kept": "leak",
    "locks_are_kept": "exception",
    "watermark_over_a_gap": "watermark",
    "watermark_on_lookup": "watermark",
    "no_boundary_object": "wrong tag",
    "one_column_off": "wrong tag",
    "end_is_not_told": "exception",
    "loads_not_planned": "hang",
    "no_end_of_reading": "leak",
    "closing_does_nothing": "leak",
    "reports_are_lost": "hang",
    "preemption_is_not_told": "hang",
}


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.name in CAUGHT_BY], ids=str)
def test_mutant_is_caught(mutant: Mutant) -> None:
    with mutant.applied():
        found = next((o.violation for seed in range(SEEDS) if (o := run_seed(seed, STEPS)).violation), "")
    assert found == CAUGHT_BY[mutant.name]
