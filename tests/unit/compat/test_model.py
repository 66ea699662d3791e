"""What vLLM's configuration is read as, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1 import kv_cache_interface as specs

from lmcache_mp_safe.compat.model import check_engine, classify, naming_facts
from lmcache_mp_safe.config import SafeConfig
from lmcache_mp_safe.contract import RankLayout
from lmcache_mp_safe.errors import ConfigError
from lmcache_mp_safe.geometry.groups import Group, GroupKind, ModelGeometry
from lmcache_mp_safe.identity import namespace

ATTENTION: dict[str, Any] = {"block_size": 16, "num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}


def recurrent(mode: str) -> specs.MambaSpec:
    return specs.MambaSpec(block_size=640, shapes=((4,),), dtypes=(torch.float32,), mamba_cache_mode=mode)


@pytest.mark.parametrize(
    ("spec", "group"),
    [
        (specs.FullAttentionSpec(**ATTENTION), Group(GroupKind.APPEND_ONLY, 16)),
        (specs.SlidingWindowSpec(**ATTENTION, sliding_window=96), Group(GroupKind.WINDOW, 16, 96)),
        (
            specs.ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_size=64),
            Group(GroupKind.CHUNKED_LOCAL, 16, 64),
        ),
        (recurrent("align"), Group(GroupKind.RECURRENT, 640)),
        (recurrent("all"), Group(GroupKind.RECURRENT, 640)),
    ],
)
def test_groups_are_classified(spec: Any, group: Group) -> None:
    assert classify(spec) == group
    uniform = specs.UniformTypeKVCacheSpecs(block_size=spec.block_size, kv_cache_specs={"layer": spec})
    assert classify(uniform) == group


def test_cross_attention_is_refused() -> None:
    with pytest.raises(ConfigError, match="remove --kv-transfer-config"):
        classify(specs.CrossAttentionSpec(**ATTENTION))


def test_recurrent_states_outside_of_block_boundaries_are_refused() -> None:
    with pytest.raises(ConfigError, match="--mamba-cache-mode align"):
        classify(recurrent("none"))


def test_kind_that_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="SimpleNamespace are not supported"):
        classify(SimpleNamespace(block_size=16))


def engine(**changes: Any) -> Any:
    facts = {
        "enable_prefix_caching": True,
        "mamba_cache_mode": "align",
        "is_hybrid": False,
        "nnodes": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        **changes,
    }
    everything = SimpleNamespace(**facts)
    return SimpleNamespace(cache_config=everything, parallel_config=everything, model_config=everything)


def test_ordinary_engine_is_taken() -> None:
    check_engine(engine())
    check_engine(engine(mamba_cache_mode="none"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"enable_prefix_caching": False}, "--enable-prefix-caching"),
        ({"is_hybrid": True, "mamba_cache_mode": "none"}, "--mamba-cache-mode align"),
        ({"decode_context_parallel_size": 2}, "remove --decode-context-parallel-size"),
        ({"prefill_context_parallel_size": 2}, "remove --prefill-context-parallel-size"),
        ({"nnodes": 2}, "on one host"),
    ],
)
def test_engine_that_cannot_be_served_is_refused_with_what_to_change(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_engine(engine(**changes))


def facts_of(changes: dict[str, Any]) -> Any:
    """Namespace of an engine that differs from an ordinary one in one thing."""
    base: dict[str, Any] = {
        "revision": None,
        "dtype": torch.bfloat16,
        "quantization": None,
        "hf_overrides": {},
        "cache_dtype": "auto",
        "mamba_cache_dtype": "auto",
        "kv_cache_layout": "NHD",
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "method": None,
        "num_speculative_tokens": 0,
        "group": Group(GroupKind.APPEND_ONLY, 16),
        "chunk_tokens": 256,
        "page": 512,
        "layout": b"l" * 16,
        "weights_id": "",
        **changes,
    }
    everything = SimpleNamespace(**base)
    config = SimpleNamespace(
        model_config=everything,
        cache_config=everything,
        parallel_config=everything,
        speculative_config=everything if base["method"] else None,
    )
    geometry = ModelGeometry.of([base["group"]], base["chunk_tokens"])
    ranks = [RankLayout(0, (base["page"],), base["layout"])]
    return namespace("m", naming_facts(config, geometry, ranks, SafeConfig(weights_id=base["weights_id"])))  # type: ignore[arg-type]


FACTS: list[dict[str, Any]] = [
    {"revision": "main"},
    {"dtype": torch.float16},
    {"quantization": "fp8"},
    {"hf_overrides": {"rope_theta": 1}},
    {"cache_dtype": "fp8"},
    {"mamba_cache_dtype": "float32"},
    {"kv_cache_layout": "HND"},
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2},
    {"method": "mtp", "num_speculative_tokens": 1},
    {"method": "mtp", "num_speculative_tokens": 3},
    {"method": "ngram", "num_speculative_tokens": 3},
    {"group": Group(GroupKind.APPEND_ONLY, 32)},
    {"group": Group(GroupKind.WINDOW, 16, 64)},
    {"chunk_tokens": 512},
    {"page": 1024},
    {"layout": b"m" * 16},
    {"weights_id": "second"},
]


def test_every_fact_of_the_engine_changes_the_namespace() -> None:
    names = [facts_of({}), *(facts_of(changes) for changes in FACTS)]
    assert len(set(names)) == len(names)
    assert facts_of({}) == names[0]
