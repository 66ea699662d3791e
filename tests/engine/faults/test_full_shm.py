"""A full /dev/shm costs stores, never answers, and is an error instead of SIGBUS. Under a mount of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lmcache_mp_safe.testing.models import ModelKind

pytestmark = [pytest.mark.engine, pytest.mark.faults]

ROOT = Path(__file__).parents[3]
POOL_GB = 0.0625
# A little more than one pool: two do not fit.
MOUNTED_MIB = 72
OWN_MOUNT = 'mount -t tmpfs -o size="$1"m tmpfs /dev/shm && shift && exec "$@"'


def own_mount() -> list[str]:
    """What runs a command with a /dev/shm of its own: as root, or as root of a user namespace."""
    for unshare in (["unshare", "--mount"], ["unshare", "--map-root-user", "--mount"]):
        command = [*unshare, "sh", "-c", OWN_MOUNT, "sh", "1"]
        if subprocess.run([*command, "true"], capture_output=True, check=False).returncode == 0:
            return [*command[:-1], str(MOUNTED_MIB)]
    pytest.skip("a private mount of /dev/shm is not permitted here: needs unshare(1) and CAP_SYS_ADMIN in a namespace")


def test_full_shared_memory_costs_stores_and_nothing_else(models: Callable[[ModelKind], Path]) -> None:
    script = [sys.executable, str(Path(__file__).with_name("full_shm.py")), str(models("hybrid")), str(POOL_GB)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    ended = subprocess.run(
        [*own_mount(), *script], capture_output=True, text=True, check=False, timeout=280, cwd=ROOT, env=environment
    )
    assert ended.returncode == 0, f"status {ended.returncode} (-7 is SIGBUS)\n{ended.stderr[-4000:]}"
    seen = json.loads(ended.stdout.splitlines()[-1])
    assert seen["left while full"] == 0
    assert seen["known hit while full"] > 0
    assert seen["divergence while full"] == "None"
    assert seen["copies failed while full"] > 0, "nothing was refused: /dev/shm was not full for the stores"
    assert seen["hit with room again"] > 0
    assert seen["hit after a restart"] > 0
    assert seen["left over"] == {}
    assert seen["internal errors"] == 0
