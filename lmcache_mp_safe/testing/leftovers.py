"""What an engine process and its server hold: counted before and after, so that whatever is left over has a name.

    before = inventory(engine)
    ...                                      # a fault
    assert not leftovers(engine, before)     # blocks, pins, locks, descriptors, mappings, threads

An inventory is a plain `Counter`, so that it can be sent over a pipe and subtracted.
"""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmcache_mp_safe.testing.engine import Engine
    from lmcache_mp_safe.testing.server import LMCacheServer

Inventory = Counter[str]

_PROCESS = Path("/proc/self")
_SHARED_MEMORY = "/dev/shm/"
_PAUSE_S = 0.1
_TEST_RUNNER = "pytest_timeout"  # its watch over a test is named after the test

# Numbers of the server's status page that are zero when nobody has a call, a lock or a slot open.
_SERVER_COUNTS = ("active_sessions", "active_prefetch_jobs")
_SERVER_POOL_COUNTS = ("read_locked_count", "write_locked_count", "staging_object_count", "temporary_count")


def process_inventory() -> Inventory:
    """Descriptors, maps of shared memory and threads of this process, by what they are."""
    return Counter[str]() + _descriptors() + _mappings() + _threads()


def inventory(engine: Engine) -> Inventory:
    """Everything an in-process engine holds: its process's own, vLLM's blocks, pins, what is owned on the server."""
    half = engine.connector.scheduler_half
    held = {"blocks": engine.held_blocks(), "pins": half.pinned_blocks}
    held |= {f"wire: {name}": count for name, count in dataclasses.asdict(half.wire.held()).items()}
    held["copies under way"] = engine.worker_connector.worker_half.jobs_left
    return process_inventory() + Counter(held)


def server_inventory(server: LMCacheServer) -> Inventory:
    """Sessions, lookups, locks and unpublished slots that the server shows on its status page."""
    status = server.status()
    pool = status["storage_manager"]["l1_manager"]
    counts = {name: status[name] for name in _SERVER_COUNTS} | {name: pool[name] for name in _SERVER_POOL_COUNTS}
    return Counter({f"server: {name}": count for name, count in counts.items() if count})


def leftovers(engine: Engine, before: Inventory, deadline_s: float = 20.0) -> Inventory:
    """What the engine holds beyond `before`. Steps it until there is nothing more, at most this long: clients and
    their threads close in the background."""

    def look() -> Inventory:
        engine.step()
        return inventory(engine)

    return settled(look, before, deadline_s)


def settled(look: Callable[[], Inventory], before: Inventory, deadline_s: float) -> Inventory:
    """Look until nothing exceeds `before`, at most this long. Returns the excess of the last look."""
    end = time.monotonic() + deadline_s
    while (excess := look() - before) and time.monotonic() < end:
        time.sleep(_PAUSE_S)
    return excess


def anonymous_bytes(pid: int) -> int:
    """Resident memory of a process that is its own: neither files nor shared memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    if found is None:
        raise OSError(f"/proc/{pid}/status shows no RssAnon")
    return int(found[1]) << 10


def _descriptors() -> Inventory:
    found: Inventory = Counter()
    for link in (_PROCESS / "fd").iterdir():
        try:
            target = str(link.readlink())
        except FileNotFoundError:  # the directory's own
            continue
        found[f"descriptor: {_kind(target)}"] += 1
    return found


def _mappings() -> Inventory:
    lines = (_PROCESS / "maps").read_text().splitlines()
    paths = (line.split(maxsplit=5)[5] for line in lines if _SHARED_MEMORY in line)
    return Counter(f"mapping: {_kind(path)}" for path in paths)


def _threads() -> Inventory:
    """Python's by their names, and the system's by theirs: libraries start threads that Python does not know."""
    python = [thread.name for thread in threading.enumerate() if not thread.name.startswith(_TEST_RUNNER)]
    names = Counter(f"thread: {_kind(name)}" for name in python)
    for task in (_PROCESS / "task").iterdir():
        try:
            names[f"task: {_kind((task / 'comm').read_text().strip())}"] += 1
        except (FileNotFoundError, ProcessLookupError):  # it just ended
            continue
    return names


def _kind(name: str) -> str:
    """The name without what differs from one of its kind to the next. A pool that was unlinked keeps that mark."""
    if name.startswith(_SHARED_MEMORY):
        return f"{_SHARED_MEMORY}...{' (deleted)' if name.endswith(' (deleted)') else ''}"
    return re.sub(r"\d+", "N", name)
