"""What the connector does about how this vLLM treats connectors of hybrid models."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lmcache_mp_safe.compat.features import probe
from lmcache_mp_safe.testing.engine import Answer, Engine, EngineSpec
from lmcache_mp_safe.testing.oracle import Tokens, compare, sessions

pytestmark = [pytest.mark.engine, pytest.mark.old_vllm]

MakeSpec = Callable[..., EngineSpec]

MAX_TOKENS = 12
RECURRENT_GROUPS = (0, 1, 2)


def ask_with_the_deepest_state_evicted(engine: Engine, prompt: Tokens, salt: str) -> tuple[Answer, list[int]]:
    """Ask twice; in between vLLM loses the recurrent state at 1,280 tokens and keeps the attention pages up to there.

    Returns:
        The second answer, and the local hits that the connector was told of for it.
    """
    engine.generate([prompt], MAX_TOKENS, salts=[salt])
    engine.drain()
    states = {block for group in RECURRENT_GROUPS for block in engine.cached_blocks(group).values()}
    deepest = {block for block in states if engine.block_pool.blocks[block].block_hash_num_tokens == 1280}
    assert deepest
    engine.block_pool.evict_blocks(deepest)
    told: list[int] = []
    connector = engine.connector
    matched = connector.get_num_new_matched_tokens

    def watched(request: object, local_tokens: int) -> tuple[int | None, bool]:
        told.append(local_tokens)
        return matched(request, local_tokens)  # type: ignore[no-any-return]

    connector.get_num_new_matched_tokens = watched
    try:
        (answer,) = engine.generate([prompt], MAX_TOKENS, salts=[salt])
    finally:
        del connector.get_num_new_matched_tokens
    return answer, told


def prompt_of(seed: int) -> Tokens:
    (session,) = sessions(seed, count=1, turns=1, system_tokens=1000, turn_tokens=(400, 400))
    return session.prompt([])


def test_attention_hit_deeper_than_the_state_resumes_where_vllm_alone_would(make_spec: MakeSpec, salt: str) -> None:
    prompt = prompt_of(31)
    with Engine(make_spec(kv_role="kv_producer", max_num_batched_tokens=700)) as engine:
        (reference,) = engine.generate([prompt], MAX_TOKENS, salts=[f"{salt}-reference"])
        answer, told = ask_with_the_deepest_state_evicted(engine, prompt, salt)
        assert set(told) == {answer.local_tokens}
        assert answer.local_tokens < 1280
        assert compare(reference, answer) is None


@pytest.mark.skipif(probe().divergent_lookup != "manager", reason="this vLLM needs no gate over its lookup")
def test_without_the_gate_the_connector_would_be_told_of_the_deeper_hit(make_spec: MakeSpec, salt: str) -> None:
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    prompt = prompt_of(32)
    with Engine(make_spec(kv_role="kv_producer", max_num_batched_tokens=700)) as engine:
        gated = KVCacheManager.get_computed_blocks_for_connector
        KVCacheManager.get_computed_blocks_for_connector = gated.__wrapped__
        try:
            _, told = ask_with_the_deepest_state_evicted(engine, prompt, salt)
        finally:
            KVCacheManager.get_computed_blocks_for_connector = gated
        assert max(told) == 1280


def test_capability_is_declared(make_spec: MakeSpec) -> None:
    with Engine(make_spec()) as engine:
        assert engine.connector.supports_divergent_local_hybrid_hits is False
        assert engine.connector.requires_kv_delivery is False
        assert engine.connector.scheduler_half is not None
        assert engine.vllm_config.kv_transfer_config.kv_load_failure_policy == "recompute"


def test_one_line_configuration_is_enough_in_every_process(make_spec: MakeSpec) -> None:
    """No module path anywhere: vLLM finds the connector through the package's entry point."""
    spec = make_spec()
    assert spec.arguments()["kv_transfer_config"].keys() == {"kv_connector", "kv_role", "kv_connector_extra_config"}
