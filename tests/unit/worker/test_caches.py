"""Page layouts out of the tensors that vLLM registers: plain look-alikes, and vLLM's own allocator where it has one."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lmcache_mp_safe.errors import ConfigError
from lmcache_mp_safe.geometry.groups import Group, GroupKind, ModelGeometry
from lmcache_mp_safe.geometry.pages import PageLayout, Segment
from lmcache_mp_safe.worker.caches import page_layout

BLOCKS = 6
PAGE = 256


@dataclass
class Spec:
    page_size_bytes: int = PAGE


def geometry(*kinds: GroupKind) -> ModelGeometry:
    return ModelGeometry(tuple(Group(kind, 16) for kind in kinds), 16, 256)


FULL = geometry(GroupKind.APPEND_ONLY)


def config(*groups: tuple[list[str], Any], num_blocks: int = BLOCKS) -> Any:
    return SimpleNamespace(
        num_blocks=num_blocks,
        kv_cache_groups=[SimpleNamespace(layer_names=names, kv_cache_spec=spec) for names, spec in groups],
    )


def raw(blocks: int = BLOCKS, page: int = PAGE) -> torch.Tensor:
    return torch.zeros(blocks * page, dtype=torch.int8)


def attention(memory: torch.Tensor, blocks: int = BLOCKS) -> torch.Tensor:
    """(blocks, keys or values, 4 tokens, 16 elements of 2 bytes)"""
    return memory.view(torch.int16).view(blocks, 2, 4, 16)


def states(memory: torch.Tensor, blocks: int = BLOCKS) -> list[torch.Tensor]:
    """Convolution and recurrent state over one page of 256 bytes, 16 of them padding."""
    convolution = torch.as_strided(memory, (blocks, 4, 10), (PAGE, 10, 1))
    recurrent = torch.as_strided(memory.view(torch.float32), (blocks, 50), (PAGE // 4, 1), storage_offset=10)
    return [convolution, recurrent]


def lengths(layout: PageLayout) -> list[list[tuple[str, int]]]:
    return [[(layer.name, layer.page_bytes) for layer in group] for group in layout.groups]


def test_groups_of_a_hybrid_model_lie_over_the_same_memory() -> None:
    memory = raw()
    layout, buffers = page_layout(
        config((["a"], Spec()), (["m"], Spec())),
        {"m": states(memory), "a": attention(memory)},
        geometry(GroupKind.APPEND_ONLY, GroupKind.RECURRENT),
    )
    assert len(buffers) == 1
    assert buffers[0].dtype is torch.uint8
    assert buffers[0].data_ptr() == memory.data_ptr()
    assert [layer.segments for group in layout.groups for layer in group] == [(Segment(0, 0, PAGE, PAGE),)] * 2


def test_hybrid_layout_with_keys_and_values_inside_of_a_block_is_one_segment() -> None:
    """What vLLM 0.27 makes of (2, blocks, ...) in a model with recurrent layers, with two kernel blocks a block."""
    half = PAGE // 4 // 2  # elements of two bytes: keys of one kernel block
    tensor = torch.as_strided(raw().view(torch.int16), (2, 2 * BLOCKS, half), (half, 2 * half, 1))
    layout, _ = page_layout(config((["a"], Spec())), {"a": tensor}, FULL)
    assert layout.groups[0][0].segments == (Segment(0, 0, PAGE, PAGE),)


def test_keys_and_values_apart_are_two_segments() -> None:
    tensor = raw().view(torch.int16).view(2, BLOCKS, 64)
    layout, _ = page_layout(config((["a"], Spec())), {"a": tensor}, FULL)
    half = PAGE // 2
    assert layout.groups[0][0].segments == (Segment(0, 0, half, half), Segment(0, BLOCKS * half, half, half))


def test_layers_packed_into_one_block_keep_their_order_and_offsets() -> None:
    memory = raw(page=2 * PAGE).view(BLOCKS, 2 * PAGE)
    caches = {name: memory[:, at : at + PAGE].view(torch.int16).view(BLOCKS, 2, 4, 16) for name, at in PACKED.items()}
    layout, buffers = page_layout(config((["b", "a"], Spec())), caches, FULL)
    assert len(buffers) == 1
    assert [layer.segments for layer in layout.groups[0]] == [
        (Segment(0, PACKED["b"], 2 * PAGE, PAGE),),
        (Segment(0, PACKED["a"], 2 * PAGE, PAGE),),
    ]


PACKED = {"a": PAGE, "b": 0}


def test_layer_that_reads_anothers_cache_has_no_pages_of_its_own() -> None:
    own = attention(raw())
    layout, _ = page_layout(config((["a", "shares"], Spec())), {"a": own, "shares": own, "outside": own}, FULL)
    assert lengths(layout) == [[("a", PAGE)]]


def test_specs_of_one_group_may_differ_by_layer() -> None:
    spec = SimpleNamespace(kv_cache_specs={"a": Spec(256), "b": Spec(128)}, page_size_bytes=384)
    caches = {"a": attention(raw()), "b": raw(page=128).view(BLOCKS, 128)}
    layout, _ = page_layout(config((["a", "b"], spec)), caches, FULL)
    assert lengths(layout) == [[("a", 256), ("b", 128)]]
    assert layout.group_page_bytes == (384,)


def test_group_that_is_not_cached_and_group_without_layers_on_this_rank_are_empty() -> None:
    kinds = geometry(GroupKind.APPEND_ONLY, GroupKind.IGNORED, GroupKind.RECURRENT)
    caches = {"a": attention(raw()), "scratch": torch.zeros(7)}
    layout, _ = page_layout(config((["a"], Spec()), (["scratch"], Spec()), ([], Spec())), caches, kinds)
    assert layout.group_page_bytes == (PAGE, 0, 0)
    assert layout.rank_layout(3, "b").group_page_bytes == (PAGE, 0, 0)
    assert layout.rank_layout(3, "b").rank == 3


def test_layer_that_vllm_did_not_register_is_an_error_and_not_left_out() -> None:
    with pytest.raises(ConfigError, match="no KV cache for b"):
        page_layout(config((["a", "b"], Spec())), {"a": attention(raw())}, FULL)


def test_cache_that_belongs_to_no_group_is_an_error() -> None:
    with pytest.raises(ConfigError, match="draft belong to no KV cache group"):
        page_layout(config((["a"], Spec())), {"a": attention(raw()), "draft": attention(raw())}, FULL)


def test_page_size_that_does_not_fit_is_an_error_with_shape_and_strides() -> None:
    with pytest.raises(ConfigError, match=r"layer a .*\(6, 2, 4, 16\) strides \(256, 128, 32, 2\)"):
        page_layout(config((["a"], Spec(2 * PAGE))), {"a": attention(raw())}, FULL)


def test_padding_that_reaches_over_the_end_of_the_memory_is_an_error() -> None:
    tight = torch.zeros((BLOCKS - 1) * 300 + PAGE, dtype=torch.int8)
    tensor = torch.as_strided(tight, (BLOCKS, PAGE), (300, 1))
    with pytest.raises(ConfigError, match="layer a would end at byte 1800"):
        page_layout(config((["a"], Spec(300))), {"a": tensor}, FULL)


def test_no_cache_at_all_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no KV cache"):
        page_layout(config(([], Spec())), {}, FULL)


# --- vLLM's own allocator ---------------------------------------------------------------------------------------------

try:  # the one-buffer allocator of newer versions
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        KVCacheLayout,
        KVCacheTensor,
        MambaSpec,
        compute_layout_strides,
    )
    from vllm.v1.worker.utils import allocate_kv_cache
except ImportError:
    allocate_kv_cache = None

needs_allocator = pytest.mark.skipif(allocate_kv_cache is None, reason="this vLLM allocates inside of its runner")
LAYOUTS = [] if allocate_kv_cache is None else [*KVCacheLayout]
# Axes are L, B, H, N, C. A padded recurrent page needs layers and blocks outermost.
HYBRID_LAYOUTS = [layout for layout in LAYOUTS if set(layout.stride_order[:2]) == {0, 1}]
# With heads outside of the layers but inside of a block, a layer's page is scattered between the other layers' heads.
SCATTERED = [x for x in LAYOUTS if x.stride_order.index(1) < x.stride_order.index(2) < x.stride_order.index(0)]


def real_config(num_blocks: int, layout: Any, *, hybrid: bool) -> Any:
    """Two attention layers, and if hybrid two recurrent ones whose group overlays theirs."""
    attention_spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
    page = attention_spec.page_size_bytes
    groups = [KVCacheGroupSpec(["a0", "a1"], attention_spec)]
    if hybrid:
        mamba_spec = MambaSpec(
            block_size=16,
            shapes=((3, 10), (4, 5)),
            dtypes=(torch.bfloat16, torch.float32),
            page_size_padded=page,
            mamba_cache_mode="align",
        )
        groups.append(KVCacheGroupSpec(["m0", "m1"], mamba_spec))
    layer_stride, block_stride, *_ = compute_layout_strides(attention_spec, num_blocks, 2, layout)
    tensors = [
        KVCacheTensor(
            size=2 * page * num_blocks, layers=group.layer_names, layer_stride=layer_stride, block_stride=block_stride
        )
        for group in groups
    ]
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=tensors, kv_cache_groups=groups)


def real_layout(num_blocks: int, layout: Any, *, hybrid: bool) -> tuple[PageLayout, dict[str, torch.Tensor]]:
    made = real_config(num_blocks, layout, hybrid=hybrid)
    caches = allocate_kv_cache(made, torch.device("cpu"), layout)
    kinds = [GroupKind.APPEND_ONLY, GroupKind.RECURRENT][: len(made.kv_cache_groups)]
    return page_layout(made, caches, geometry(*kinds))[0], caches


REAL = [(layout, False) for layout in LAYOUTS if layout not in SCATTERED] + [(x, True) for x in HYBRID_LAYOUTS]


@needs_allocator
@pytest.mark.parametrize(("layout", "hybrid"), REAL)
def test_pages_are_where_vllms_allocator_put_them(layout: Any, hybrid: bool) -> None:
    """Mark a block of a layer through vLLM's view: only that page changes, and all of it where nothing is padded."""
    pages, caches = real_layout(5, layout, hybrid=hybrid)
    buffer = torch.empty(0, dtype=torch.uint8).set_(caches["a0"].untyped_storage())
    for layer in (layer for group in pages.groups for layer in group):
        for block in range(5):
            buffer.zero_()
            caches[layer.name].view(torch.int8)[block].fill_(1)
            changed = set(torch.nonzero(buffer).flatten().tolist())
            starts = [(s.offset + block * s.stride, s.length) for s in layer.segments]
            page = {byte for start, length in starts for byte in range(start, start + length)}
            assert changed <= page
            assert changed == page or layer.name.startswith("m")


@needs_allocator
@pytest.mark.parametrize(("layout", "hybrid"), REAL)
def test_digest_of_vllms_layout_does_not_depend_on_the_size_of_the_pool(layout: Any, hybrid: bool) -> None:
    digests = {real_layout(blocks, layout, hybrid=hybrid)[0].digest for blocks in (3, 4, 8, 16, 17, 1024)}
    assert len(digests) == 1


@needs_allocator
@pytest.mark.parametrize("layout", SCATTERED)
def test_page_that_is_scattered_between_other_layers_is_refused(layout: Any) -> None:
    with pytest.raises(ConfigError, match="layer a0 has a layout that is not known"):
        real_layout(5, layout, hybrid=False)
