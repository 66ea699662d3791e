"""Speculation on a real engine without any connector: drafts are accepted, some are not, and the oracle holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_mp_safe.testing.engine import Engine, EngineSpec, Speculation
from lmcache_mp_safe.testing.oracle import Turn, check_local, recompute, sessions

pytestmark = pytest.mark.engine

MAX_TOKENS = 24


@pytest.mark.parametrize("speculation", ["ngram", "mtp"])
def test_drafts_are_accepted_and_a_local_hit_gives_the_same_bits(speculation: Speculation, tmp_path: Path) -> None:
    with Engine(EngineSpec(str(tmp_path), speculation=speculation)) as engine:
        turns = recompute(
            engine, sessions(seed=1, count=1, turns=2, system_tokens=1000, turn_tokens=(500, 900)), MAX_TOKENS
        )
        assert MAX_TOKENS / 4 < count_steps(engine, turns[0]) < MAX_TOKENS
        for turn in turns:
            engine.reset_prefix_cache()
            check_local(engine, [turn], salt="local")
            report = check_local(engine, [turn], salt="local")
            assert (report.local_hits, report.divergences) == (1, [])


def count_steps(engine: Engine, turn: Turn) -> int:
    engine.reset_prefix_cache()
    engine.submit(turn.prompt, MAX_TOKENS, salt="steps")
    steps = 1
    while not engine.step():
        steps += 1
    return steps
