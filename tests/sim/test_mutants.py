"""The simulator notices mistakes: each of these is caught, by name, within a known number of seeds."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lmcache_mp_safe.testing.sim.run import run_seed

sys.path.insert(0, str(Path(__file__).parent))

from mutants import MUTANTS, Mutant

STEPS = 120
FEW = 3  # seeds; the fast suite has no time for more
PAGE = Path(__file__).parents[2] / "docs" / "mutants.md"


@pytest.mark.parametrize(
    "mutant", [pytest.param(m, marks=pytest.mark.long if m.seeds > FEW else (), id=m.name) for m in MUTANTS]
)
def test_mutant_is_caught(mutant: Mutant) -> None:
    with mutant.applied():
        found = next((o.violation for seed in range(mutant.seeds) if (o := run_seed(seed, STEPS)).violation), "")
    assert found == mutant.caught_by


def test_page_lists_every_mutant_with_what_catches_it() -> None:
    rows = [f"| {m.name} | {m.broken} | {m.caught_by} | {m.seeds} |" for m in MUTANTS]
    assert [line for line in PAGE.read_text().splitlines() if line in rows] == rows
