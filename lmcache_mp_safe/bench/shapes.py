"""The two models that the hook and wire cases run: only the shapes of their KV caches, without weights."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec


@dataclass(frozen=True)
class Shape:
    """A model as vLLM's scheduler sees it.

    Attributes:
        block_tokens: tokens in a block of every group.
        stock_chunk: `--chunk-size` of the stock connector's server: it must be a multiple of the block, so the default
            of 256 cannot serve the hybrid; ours runs at the default with both.
        layers: layers of one KV cache group.
        state_groups: groups of recurrent layers, of the same page size as the attention group.
        key_value_heads, head_dim, value_bytes: of an attention layer.
    """

    name: str
    block_tokens: int
    stock_chunk: int
    layers: int
    state_groups: int
    key_value_heads: int
    head_dim: int
    value_bytes: int

    @property
    def page_bytes(self) -> int:
        """One layer's page of one block."""
        return 2 * self.key_value_heads * self.head_dim * self.value_bytes * self.block_tokens

    def group_page_bytes(self, ranks: int) -> tuple[int, ...]:
        """What each of the ranks holds of a block, by group: every rank has its share of the heads."""
        return (self.layers * self.page_bytes // ranks,) * (1 + self.state_groups)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a request of this many tokens may hold at once, with some to spare."""
        return -(-tokens // self.block_tokens) * (1 + self.state_groups) + 8


# 64 layers as in Qwen3.5-27B, every fourth of full attention, KV in fp8: with a drafter its block is 1,616 tokens.
HYBRID = Shape("hybrid", 1616, 1616, 16, 3, 4, 256, 1)
# 36 layers as in Qwen3-8B, KV in bf16, vLLM's default block.
ATTENTION = Shape("attention", 16, 256, 36, 0, 8, 128, 2)


def kv_cache_config(shape: Shape, blocks: int) -> KVCacheConfig:
    full = FullAttentionSpec(
        block_size=shape.block_tokens,
        num_kv_heads=shape.key_value_heads,
        head_size=shape.head_dim,
        dtype=torch.uint8 if shape.value_bytes == 1 else torch.bfloat16,
    )
    state = MambaSpec(
        block_size=shape.block_tokens,
        shapes=((1024,),),
        dtypes=(torch.float32,),
        page_size_padded=shape.page_bytes,
        mamba_cache_mode="align",
    )
    groups = [full] + [state] * shape.state_groups
    return KVCacheConfig(
        num_blocks=blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([f"group{number}.layer{i}" for i in range(shape.layers)], spec)
            for number, spec in enumerate(groups)
        ],
    )


def vllm_config(shape: Shape, step_tokens: int, extra: dict[str, Any], rank: int = 0, ranks: int = 1) -> Any:
    """What connectors read of vLLM's configuration."""
    transfer = SimpleNamespace(
        kv_connector_extra_config=extra,
        get_from_extra_config=extra.get,
        is_kv_producer=True,
        is_kv_consumer=True,
        kv_load_failure_policy="recompute",
        kv_role="kv_both",
    )
    mode = "align" if shape.state_groups else "none"
    return SimpleNamespace(
        kv_transfer_config=transfer,
        kv_events_config=None,
        speculative_config=None,
        model_config=SimpleNamespace(
            model=f"bench/{shape.name}",
            revision=None,
            dtype=torch.bfloat16,
            quantization=None,
            hf_overrides={},
            is_hybrid=bool(shape.state_groups),
            use_mla=False,
        ),
        cache_config=SimpleNamespace(
            block_size=shape.block_tokens,
            enable_prefix_caching=True,
            mamba_cache_mode=mode,
            cache_dtype="auto",
        ),
        parallel_config=SimpleNamespace(
            rank=rank,
            world_size=ranks,
            tensor_parallel_size=ranks,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
            nnodes=1,
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=step_tokens),
    )
