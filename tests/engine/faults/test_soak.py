"""The soak itself: a connector that loads wrong states must be found out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.faults]


def test_soak_notices_states_that_arrive_wrong(tmp_path: Path) -> None:
    file = tmp_path / "soak.json"
    command = [sys.executable, "-m", "lmcache_mp_safe.testing.soak", "--mutant", "--json", str(file)]
    command += ["--minutes", "1", "--speculation", "none"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=350)
    assert ended.returncode == 1, ended.stderr[-4000:]
    (arm,) = json.loads(file.read_text())["arms"]
    assert arm["failure"] == ""
    assert arm["hits"] > 0, "nothing was loaded, so nothing could be noticed"
    assert arm["divergences"]
