"""vLLM's engine-core process loses the block size at which its scheduler ends steps: see `compat/block_size.py`.

Then the state that is found at a boundary may be one from before it. The connector keeps the block size. Without it
vLLM's own hits are wrong, which is shown here as well, so that a vLLM that mends it is noticed.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest

from lmcache_mp_safe.compat.block_size import StepBlockSize
from lmcache_mp_safe.testing.engine import Answer, Engine, EngineSpec
from lmcache_mp_safe.testing.engine_worker import EngineProcess
from lmcache_mp_safe.testing.oracle import Runner, Tokens, compare, words

pytestmark = pytest.mark.engine

MakeSpec = Callable[..., EngineSpec]

BLOCK, VLLM_DEFAULT = 640, 128
# Steps of at most 1,000 tokens end at multiples of 640, or of 128: then the first at 896, and none at a block's end.
STEP_TOKENS = 1000
PROMPTS = (words(random.Random(1), 1900), words(random.Random(2), 2500))
MAX_TOKENS = 8


def ask(engine: Runner, prompt: Tokens, salt: str) -> Answer:
    return engine.generate([prompt], MAX_TOKENS, salts=[salt])[0]


def wrong_hits(engine: Runner, salt: str, *, connector: bool = True) -> dict[str, int]:
    """Of the hits on each kind of cache, how many differ from recomputing."""
    wrong = {"local": 0, "external": 0}
    for number, prompt in enumerate(PROMPTS):
        alone = ask(engine, prompt, f"{salt}-alone-{number}")
        first, local = (ask(engine, prompt, salt) for _ in range(2))
        assert (alone.cached_tokens, first.cached_tokens) == (0, 0)
        assert local.local_tokens >= BLOCK
        assert compare(alone, first) is None
        wrong["local"] += compare(alone, local) is not None
        if connector:
            engine.reset_prefix_cache()
            external = ask(engine, prompt, salt)
            assert external.external_tokens >= BLOCK
            wrong["external"] += compare(alone, external) is not None
    return wrong


def test_engine_process_serves_no_wrong_state_where_the_connector_is(make_spec: MakeSpec, salt: str) -> None:
    with EngineProcess(make_spec(max_num_batched_tokens=STEP_TOKENS, in_process=False)) as engine:
        assert wrong_hits(engine, salt) == {"local": 0, "external": 0}


def test_engine_process_of_this_vllm_serves_wrong_states_of_its_own(make_spec: MakeSpec, salt: str) -> None:
    """No connector at all. If this fails, vLLM was mended: say so in docs/verify.md."""
    spec = make_spec(max_num_batched_tokens=STEP_TOKENS, in_process=False)
    with EngineProcess(dataclasses.replace(spec, connector=None, connector_extra={})) as engine:
        assert wrong_hits(engine, salt, connector=False)["local"] == len(PROMPTS)


@pytest.mark.parametrize("kept", [pytest.param(True, marks=pytest.mark.long), False])
def test_block_size_that_is_not_kept_makes_hits_of_every_kind_wrong(
    make_spec: MakeSpec, salt: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kept:
        monkeypatch.setattr(StepBlockSize, "keep", lambda self: None)
    with Engine(make_spec(max_num_batched_tokens=STEP_TOKENS)) as engine:
        engine.vllm_config.__post_init__()  # as `EngineCoreProc._perform_handshakes` does once the engine is made
        assert engine.vllm_config.cache_config.block_size == VLLM_DEFAULT
        wrong = 0 if kept else len(PROMPTS)
        assert wrong_hits(engine, salt) == {"local": wrong, "external": wrong}
        assert engine.vllm_config.cache_config.block_size == (BLOCK if kept else VLLM_DEFAULT)
