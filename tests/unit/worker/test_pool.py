"""The mapped pool: bounds, claims, and a shared memory that is really full."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from lmcache_mp_safe.contract import SHARED_MEMORY, PoolSegment
from lmcache_mp_safe.errors import LocalError, ServerError
from lmcache_mp_safe.geometry.payload import ObjectLayout
from lmcache_mp_safe.ops.contract import Bytes, SlotMemory
from lmcache_mp_safe.ops.reference import PlainMemory
from lmcache_mp_safe.testing.pools import pool_file
from lmcache_mp_safe.worker.pool import MappedPool

MIB = 1 << 20


def adopt(_: Bytes) -> SlotMemory:
    return PlainMemory()


SIZE = 5 * MIB
ROOT = Path(__file__).parents[3]


@pytest.fixture
def segment() -> Iterator[PoolSegment]:
    with pool_file(SIZE, ObjectLayout.for_payload([1000])) as made:
        yield made


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(offset, size) of every claim that reaches the system."""
    seen: list[tuple[int, int]] = []
    real = os.posix_fallocate

    def noting(file: int, offset: int, size: int) -> None:
        seen.append((offset, size))
        real(file, offset, size)

    monkeypatch.setattr("os.posix_fallocate", noting)
    return seen


def test_memory_is_claimed_once_in_steps_that_end_with_the_pool(
    segment: PoolSegment, claims: list[tuple[int, int]]
) -> None:
    pool = MappedPool(segment, adopt)
    pool.claim(MIB, 2 * MIB)
    pool.claim(3 * MIB, 100)
    pool.claim(4 * MIB, MIB)
    assert claims == [(0, 2 * MIB), (2 * MIB, 2 * MIB), (4 * MIB, MIB)]
    assert (SHARED_MEMORY / segment.name).stat().st_blocks * 512 == SIZE
    pool.close()


def test_claim_keeps_what_is_there(segment: PoolSegment) -> None:
    with (SHARED_MEMORY / segment.name).open("r+b") as file:
        file.write(b"abc")
    pool = MappedPool(segment, adopt)
    pool.claim(0, 100)
    assert pool.view(0, 4).tobytes() == b"abc\0"
    pool.close()


def test_view_outside_of_the_pool_or_after_unmapping_is_an_error(segment: PoolSegment) -> None:
    pool = MappedPool(segment, adopt)
    for offset, size in [(-1, 1), (SIZE, 1), (0, SIZE + 1), (4, -1), (2**63, 1)]:
        with pytest.raises(ServerError, match="outside"):
            pool.view(offset, size)
    assert pool.view(SIZE, 0).size == 0
    pool.close()
    pool.close()
    with pytest.raises(LocalError, match="unmapped"):
        pool.view(0, 1)


def test_mapping_does_not_make_anyone_unlink_the_servers_segment(segment: PoolSegment) -> None:
    script = f"""
        from lmcache_mp_safe.contract import PoolSegment
        from lmcache_mp_safe.ops.reference import PlainMemory
        from lmcache_mp_safe.worker.pool import MappedPool
        MappedPool(PoolSegment(1, {segment.name!r}, {SIZE}, {segment.inode}), lambda _: PlainMemory()).view(0, 1)[0] = 7
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], cwd=ROOT, check=True, timeout=60)
    assert (SHARED_MEMORY / segment.name).read_bytes()[:2] == b"\x07\0"


FULL = """
    import os, subprocess, sys
    from pathlib import Path

    import numpy as np

    from lmcache_mp_safe.contract import JobOutcome, LoadJob, ObjectCopy, PoolSegment, StepPlan, StoreJob
    from lmcache_mp_safe.geometry.payload import ObjectLayout
    from lmcache_mp_safe.ops.reference import ReferenceBackend
    from lmcache_mp_safe.testing.pools import simple_pages
    from lmcache_mp_safe.worker import pool
    from lmcache_mp_safe.worker.half import WorkerHalf

    where = Path(sys.argv[1])
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", where], check=True)
    pool.SHARED_MEMORY = where
    layout = ObjectLayout.for_payload([1 << 20])
    slots = [number * layout.object_bytes for number in range(8)]
    size = 8 * layout.object_bytes
    (where / "p").touch()
    os.truncate(where / "p", size)
    pages, bytes_ = simple_pages([[1 << 20]], 4)
    memory = np.full(bytes_, 7, np.uint8)
    segment = PoolSegment(1, "p", size, (where / "p").stat().st_ino, ((0, layout.object_bytes),))
    half = WorkerHalf(rank=0, pages=pages, backend=ReferenceBackend([memory], "test"))
    copies = [ObjectCopy(b"d" * 32, ((1,),), (slot,)) for slot in slots]
    half.begin_step(StepPlan(1, segment, stores=tuple(StoreJob(n, 1, copy) for n, copy in enumerate(copies))))
    loads = tuple(LoadJob(100 + n, 1, str(n), (ObjectCopy(b"d" * 32, ((2,),), (s,)),)) for n, s in enumerate(slots))
    half.begin_step(StepPlan(2, segment, loads=loads))
    report = half.take_report()
    stored = [job.outcome for job in report.jobs[:8]]
    assert stored == [JobOutcome.DONE] * 3 + [JobOutcome.COPY_FAILED] * 5, stored
    assert all("enlarge /dev/shm" in job.detail for job in report.jobs[3:8])
    # What is stored is served in a full shared memory, too; a hole is not touched.
    assert [job.outcome for job in report.jobs[8:]] == stored, report.jobs[8:]
"""


NO_CLAIMS = "pool.MappedPool.claim = lambda *_: None\n"


def run_full(where: Path, mutant: str = "") -> subprocess.CompletedProcess[str]:
    """Stores and loads over a tmpfs of 4 MiB under a pool of 8, in a mount namespace of its own."""
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    try:
        subprocess.run([*unshare, "true"], check=True, capture_output=True, timeout=60)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no mount namespaces here")
    script = textwrap.dedent(FULL).replace("pool.SHARED_MEMORY", mutant + "pool.SHARED_MEMORY")
    command = [*unshare, sys.executable, "-c", script, str(where)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


def test_full_shared_memory_ends_jobs_and_not_the_process(tmp_path: Path) -> None:
    ended = run_full(tmp_path)
    assert ended.returncode == 0, ended.stderr


def test_the_check_on_full_shared_memory_can_fail(tmp_path: Path) -> None:
    assert run_full(tmp_path, NO_CLAIMS).returncode == -signal.SIGBUS
