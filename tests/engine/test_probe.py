"""The race audit and the oracle of GPU engines run on a CPU engine, too; here so that they run at all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("phases", "sessions"),
    [("ext,audit,multi", 1), pytest.param("ref,apc,ext,control,audit,multi,race", 2, marks=pytest.mark.long)],
)
def test_probe_of_a_cpu_engine_finds_nothing_wrong(tmp_path: Path, phases: str, sessions: int) -> None:
    out = tmp_path / "probe.json"
    command = [sys.executable, "-m", "benchmarks.probe", "--device", "cpu", "--spec", "none", "--out", str(out)]
    command += ["--phases", phases, "--sessions", str(sessions), "--turns", "2", "--max-tokens", "4"]
    command += ["--race-sessions", "2", "--race-blocks", "3", "--race-stalls", "100:60", "--gpu-blocks", "40"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert found["problems"] == []
    assert found["phases"]["ext"]["against_ref"]["hits"] > 0
    assert found["phases"]["multi"]["audit"]["loaded"] > 0
    assert found["left"] == {"held_blocks": 0, "pins": 0, "pending": False}


def test_environment_that_is_made_late_keeps_the_threads_that_numba_has() -> None:
    """numba refuses another number once it has threads, which is when the first draft is made."""
    code = """if True:
        import numba, os
        numba.config.NUMBA_NUM_THREADS = 3
        from lmcache_mp_safe.testing.engine import EngineSpec, _prepare_environment
        _prepare_environment(EngineSpec("x"))
        assert os.environ["NUMBA_NUM_THREADS"] == "3"
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA")}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, timeout=60, check=True)
