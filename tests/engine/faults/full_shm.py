"""Run by `test_full_shm.py` under a /dev/shm of its own, which is small: what happens when it is full, as JSON.

A page of the pool that cannot be backed is SIGBUS for whoever touches it, so all of this is a process of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmcache_mp_safe.testing.engine import Engine, EngineSpec
from lmcache_mp_safe.testing.leftovers import leftovers
from lmcache_mp_safe.testing.oracle import compare
from lmcache_mp_safe.testing.server import LMCacheServer
from lmcache_mp_safe.testing.stand import DEADLINES, MAX_TOKENS, Stand, prompt_of

SHARED_MEMORY = Path("/dev/shm")


@contextlib.contextmanager
def full() -> Iterator[None]:
    """Not a page is left."""
    filler = SHARED_MEMORY / "filler"
    with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 12)):
            pass
    try:
        yield
    finally:
        filler.unlink()


def left_bytes() -> int:
    status = os.statvfs(SHARED_MEMORY)
    return status.f_bavail * status.f_frsize


def run(model: str, pool_gb: float) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    with LMCacheServer(l1_size_gb=pool_gb) as server:
        address = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server.port, **DEADLINES}
        with Engine(EngineSpec(model, connector="safe", connector_extra=address)) as engine:
            prompt, other = prompt_of(41), prompt_of(42)
            (other_reference,) = engine.generate([other], MAX_TOKENS, salts=["reference"])
            stand = Stand.of(engine, server, prompt)
            counters = engine.connector.scheduler_half.counters
            with full():
                seen["left while full"] = left_bytes()
                seen["known hit while full"] = stand.ask_until_hit("stand").external_tokens
                engine.reset_prefix_cache()
                failed = counters["store_copies_failed"]
                (answer,) = engine.generate([other], MAX_TOKENS, salts=["new"])
                engine.drain(30)
                seen["divergence while full"] = str(compare(other_reference, answer))
                seen["copies failed while full"] = counters["store_copies_failed"] - failed
            seen["hit with room again"] = stand.ask_until_hit("later").external_tokens
            # The next server's pool fits only when nobody holds the last one's any more.
            server.kill()
            stand.ask("away")
            server.start()
            stand.wait_until_up()
            seen["hit after a restart"] = stand.ask_until_hit("back").external_tokens
            seen["left over"] = dict(leftovers(engine, stand.before))
            seen["internal errors"] = counters["internal_errors"]
    return seen


if __name__ == "__main__":
    sys.stdout.write(json.dumps(run(sys.argv[1], float(sys.argv[2]))) + "\n")
    sys.stdout.flush()
    os._exit(0)  # threads that a library left behind must not keep an ended process alive
