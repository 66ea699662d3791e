"""The engine in a process of its own: the same answers, a deadline for every call, and a clean death."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lmcache_mp_safe.testing.engine import Engine, EngineSpec
from lmcache_mp_safe.testing.engine_worker import EngineCallError, EngineDiedError, EngineProcess
from lmcache_mp_safe.testing.oracle import compare, sessions

pytestmark = pytest.mark.engine

PROMPT = sessions(seed=3, count=1, turns=1)[0].prompt([])


def name_of_block_size(engine: Engine, words: str) -> str:
    return f"{words} {engine.block_size}"


def sleep(engine: Engine, seconds: float) -> None:
    time.sleep(seconds)


def test_an_engine_process_answers_like_an_engine_here_and_dies_on_demand(tmp_path: Path) -> None:
    spec = EngineSpec(str(tmp_path / "model"))
    with Engine(spec) as engine:
        (here,) = engine.generate([PROMPT], 8)
    with EngineProcess(spec, log=tmp_path / "log") as process:
        (there,) = process.generate([PROMPT], 8)
        assert compare(here, there) is None
        process.reset_prefix_cache()
        assert process.held_blocks() == 0
        assert process.run(name_of_block_size, "blocks of") == "blocks of 640"
        with pytest.raises(EngineCallError, match="maximum context length"):
            process.generate([PROMPT * 40], 8)
        with pytest.raises(EngineDiedError, match="took more than"):
            process.run(sleep, 60.0, deadline_s=0.5)
        with pytest.raises(EngineDiedError):
            process.held_blocks()
