"""What vLLM's configuration says about the model: its KV cache groups, its ranks, and what names its bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import vllm
from vllm.v1 import kv_cache_interface as specs

from lmcache_mp_safe.config import SafeConfig
from lmcache_mp_safe.contract import RankLayout
from lmcache_mp_safe.errors import ConfigError
from lmcache_mp_safe.geometry.groups import Group, GroupKind, ModelGeometry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def classify(spec: Any) -> Group:
    """The class of one KV cache group.

    Raises:
        ConfigError: the group cannot be served; the message says what to change.
    """
    per_layer = getattr(spec, "kv_cache_specs", None)
    if isinstance(per_layer, dict):
        return classify(next(iter(per_layer.values())))
    block_tokens = int(spec.block_size)
    name = type(spec).__name__
    if isinstance(spec, specs.CrossAttentionSpec):
        raise ConfigError("encoder-decoder models (cross-attention KV) are not supported; remove --kv-transfer-config")
    if not getattr(spec, "prefix_cacheable", True) or isinstance(spec, specs.EncoderOnlyAttentionSpec):
        return Group(GroupKind.IGNORED, block_tokens)
    if isinstance(spec, specs.MambaSpec):
        if spec.mamba_cache_mode not in ("align", "all"):
            raise ConfigError(
                f"mamba_cache_mode is {spec.mamba_cache_mode!r}: recurrent states are not cached at block boundaries;"
                " start vLLM with --mamba-cache-mode align"
            )
        return Group(GroupKind.RECURRENT, block_tokens)
    if isinstance(spec, specs.SlidingWindowSpec):
        span = int(spec.sliding_window) + int(getattr(spec, "extra_retained_tokens", 0))
        return Group(GroupKind.WINDOW, block_tokens, span)
    if isinstance(spec, specs.ChunkedLocalAttentionSpec):
        return Group(GroupKind.CHUNKED_LOCAL, block_tokens, int(spec.attention_chunk_size))
    if isinstance(spec, specs.FullAttentionSpec) and name != "RSWASpec":
        return Group(GroupKind.APPEND_ONLY, block_tokens)
    raise ConfigError(f"KV cache groups of kind {name} are not supported; remove --kv-transfer-config")


def geometry_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, config: SafeConfig) -> ModelGeometry:
    """Classify all groups and choose the chunk length.

    Raises:
        ConfigError: the model or the engine's settings cannot be served; the message says what to change.
    """
    check_engine(vllm_config)
    groups = [classify(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups]
    if all(group.kind is GroupKind.IGNORED for group in groups):
        raise ConfigError("this model has no KV cache group that a prefix cache could serve")
    return ModelGeometry.of(groups, config.chunk_tokens)


def check_engine(vllm_config: VllmConfig) -> None:
    """Refuse engine settings that cannot be served.

    Raises:
        ConfigError: names the vLLM flag to change.
    """
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    if not cache.enable_prefix_caching:
        raise ConfigError(
            "prefix caching is off, and this connector stores what vLLM's prefix cache would serve;"
            " start vLLM with --enable-prefix-caching"
        )
    mode = getattr(cache, "mamba_cache_mode", "none")
    if getattr(vllm_config.model_config, "is_hybrid", False) and mode not in ("align", "all"):
        raise ConfigError(
            f"mamba_cache_mode is {mode!r} on a model with recurrent layers: their states are not cached at block"
            " boundaries; start vLLM with --mamba-cache-mode align"
        )
    for attribute, flag in (
        ("decode_context_parallel_size", "--decode-context-parallel-size"),
        ("prefill_context_parallel_size", "--prefill-context-parallel-size"),
    ):
        if getattr(parallel, attribute, 1) > 1:
            raise ConfigError(f"context parallelism is not supported yet; remove {flag}")
    if getattr(parallel, "nnodes", 1) > 1:
        raise ConfigError("ranks on several hosts are not supported yet; serve the model on one host")


def hit_margin_tokens(vllm_config: VllmConfig, geometry: ModelGeometry) -> int:
    """Tokens below the last full block at which vLLM's own hits end.

    With a drafter that reads the target's hidden states (MTP, EAGLE) vLLM drops the last matching block, so that the
    drafter sees it computed. A hit that went deeper would still be right in meaning, but its remainder would be
    computed in a step of another shape than after a local hit, and differ from it by rounding.
    """
    speculative = vllm_config.speculative_config
    if speculative is None:
        return 0
    drops = getattr(speculative, "use_eagle_block_drop", speculative.use_eagle)
    return geometry.block_tokens if drops() else 0


@dataclass(frozen=True)
class RankPlace:
    """Where this process sits among the ranks of its model."""

    rank: int
    world_size: int


def rank_place(vllm_config: VllmConfig, tensor_rank: int, pipeline_rank: int) -> RankPlace:
    """Pipeline stage major, tensor rank minor."""
    parallel = vllm_config.parallel_config
    width = int(parallel.tensor_parallel_size)
    return RankPlace(pipeline_rank * width + tensor_rank, width * int(parallel.pipeline_parallel_size))


def naming_facts(
    vllm_config: VllmConfig, geometry: ModelGeometry, ranks: Sequence[RankLayout], config: SafeConfig
) -> list[tuple[str, Any]]:
    """Everything besides the tokens that decides what an object's bytes mean (I10)."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    return [
        ("vllm", vllm.__version__),
        ("revision", model.revision),
        ("dtype", str(model.dtype)),
        ("quantization", str(model.quantization)),
        ("hf_overrides", repr(model.hf_overrides)),
        ("cache_dtype", str(cache.cache_dtype)),
        (
            "mamba_dtypes",
            (str(getattr(cache, "mamba_cache_dtype", "")), str(getattr(cache, "mamba_ssm_cache_dtype", ""))),
        ),
        ("layout", str(getattr(cache, "kv_cache_layout", "")) if hasattr(cache, "kv_cache_layout") else ""),
        ("groups", [(group.kind.value, group.block_tokens, group.span_tokens) for group in geometry.groups]),
        ("block_tokens", geometry.block_tokens),
        ("chunk_tokens", geometry.chunk_tokens),
        ("parallel", (parallel.tensor_parallel_size, parallel.pipeline_parallel_size)),
        ("speculative", None if speculative is None else (speculative.method, speculative.num_speculative_tokens)),
        ("ranks", [(rank.rank, rank.group_page_bytes, rank.digest) for rank in ranks]),
        ("weights_id", config.weights_id),
    ]
