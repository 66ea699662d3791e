"""Objects go between the moment in which they were found and the moment in which they are used."""

from __future__ import annotations

import mmap
import os
import time

import pytest

from lmcache_mp_safe.testing.engine import Answer
from lmcache_mp_safe.testing.moments import Moment, at
from lmcache_mp_safe.testing.oracle import Tokens, compare
from lmcache_mp_safe.testing.server import LMCacheServer
from lmcache_mp_safe.testing.stand import MAX_TOKENS, Stand, prompt_of

pytestmark = [pytest.mark.engine, pytest.mark.faults]

POOL_GB = 5 / 1024  # sixteen objects or so: what three prompts leave
EVICTION_S = 1.2  # the server looks once a second whether its pool is nearly full


def clear_and_reuse(server: LMCacheServer) -> None:
    """Everything is dropped, and the room is used for something else."""
    server.clear()
    file = os.open(server.segment_path, os.O_RDWR)
    try:
        with mmap.mmap(file, 0) as pool:
            pool[:] = b"\xa5" * len(pool)
    finally:
        os.close(file)


@pytest.mark.parametrize("moment", [moment for moment in Moment if moment.is_of_a_hit])
def test_everything_is_evicted_and_reused_at_a_moment_of_a_hit(stand: Stand, salt: str, moment: Moment) -> None:
    stand.ask(salt)
    stand.ask_until_hit(salt)
    with at(stand.engine, moment, lambda: clear_and_reuse(stand.server)) as seen:
        struck = stand.ask(salt)
    assert seen.happened
    assert struck.external_tokens == 0, "what is gone cannot have been used"
    stand.ask_until_hit(salt)
    stand.check_nothing_is_left()


def test_pool_that_is_too_small_for_what_is_asked_evicts_and_never_serves_another_prefix(
    stand: Stand, salt: str
) -> None:
    engine, counters = stand.engine, stand.engine.connector.scheduler_half.counters
    stored, prompts = counters["objects_stored"], [prompt_of(seed) for seed in range(60, 64)]
    references = [engine.generate([prompt], MAX_TOKENS, salts=[f"{salt}-{i}"])[0] for i, prompt in enumerate(prompts)]
    for prompt, reference in zip(prompts, references, strict=True):
        assert hits_in_the_end(stand, prompt, reference, salt)
    engine.drain(30)
    pool, size = stand.server.status()["storage_manager"]["l1_usage"][1], engine.connector.scheduler_half.objects
    room = pool // size.layout.object_bytes
    assert counters["objects_stored"] - stored > room, "the pool was never full: nothing was shown"
    stand.check_nothing_is_left()


def hits_in_the_end(stand: Stand, prompt: Tokens, reference: Answer, salt: str) -> bool:
    """Whether the prompt is hit in one of some attempts, none of which may answer otherwise than its reference."""
    for _ in range(6):
        stand.engine.drain(30)
        stand.engine.reset_prefix_cache()
        (answer,) = stand.engine.generate([prompt], MAX_TOKENS, salts=[salt])
        assert compare(reference, answer) is None
        if answer.external_tokens:
            return True
        time.sleep(EVICTION_S)  # what found no room is stored by the next one
    return False
