"""Where the pages of a block lie in the memory of one rank's KV cache.

vLLM hands over one tensor a layer, or a list of state tensors for a recurrent one, as views into a few flat buffers.
The shapes differ between versions and backends; the strides tell where a block's bytes are:

* a *blocks* dimension of `num_blocks`, or of `num_blocks * k` where a kernel block is a k-th of a block,
* dimensions with larger strides, which cut a page into *segments* (K and V, or heads, kept apart),
* dimensions with smaller strides, which lie inside a segment.

A page is copied whole, padding and inline scales included.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from lmcache_mp_safe.contract import RankLayout
from lmcache_mp_safe.errors import ConfigError


@dataclass(frozen=True)
class TensorView:
    """One tensor over a flat buffer. Offsets and strides in bytes.

    Attributes:
        buffer: index of the buffer it is a view of.
    """

    buffer: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str


@dataclass(frozen=True)
class Segment:
    """Part of every page of a layer: block b has the bytes [offset + b * stride, + length) of a buffer."""

    buffer: int
    offset: int
    stride: int
    length: int


@dataclass(frozen=True)
class Layer:
    """One layer's pages.

    Attributes:
        described: what decides the meaning of a page's bytes: element types, shapes, and where in the page they lie.
            The number of blocks, and any stride or offset that depends on it, is not in it.
    """

    name: str
    segments: tuple[Segment, ...]
    described: str

    @property
    def page_bytes(self) -> int:
        return sum(segment.length for segment in self.segments)


@dataclass(frozen=True)
class SegmentTable:
    """The segments of all layers of a group in payload order, one array of shape (segments,) a field of `Segment`."""

    buffer: NDArray[np.int64]
    offset: NDArray[np.int64]
    stride: NDArray[np.int64]
    length: NDArray[np.int64]

    @classmethod
    def of(cls, layers: Sequence[Layer]) -> SegmentTable:
        rows = [(s.buffer, s.offset, s.stride, s.length) for layer in layers for s in layer.segments]
        return cls(*np.array(rows, dtype=np.int64).reshape(len(rows), 4).T)


@dataclass(frozen=True)
class PageLayout:
    """Layers of each KV cache group on this rank, in payload order.

    Attributes:
        num_blocks: blocks in vLLM's pool; block ids are below it.
    """

    groups: tuple[tuple[Layer, ...], ...]
    num_blocks: int

    @property
    def group_page_bytes(self) -> tuple[int, ...]:
        return tuple(sum(layer.page_bytes for layer in layers) for layers in self.groups)

    @cached_property
    def segment_tables(self) -> tuple[SegmentTable, ...]:
        return tuple(SegmentTable.of(layers) for layers in self.groups)

    @property
    def digest(self) -> bytes:
        """16 bytes over names, segments and what they mean; the number of blocks and addresses do not count, so that
        engines with pools of different size share objects."""
        state = hashlib.blake2b(digest_size=16)
        for number, layers in enumerate(self.groups):
            for layer in layers:
                lengths = [segment.length for segment in layer.segments]
                state.update(f"{number} {layer.name} {lengths} {layer.described}\n".encode())
        return state.digest()

    def rank_layout(self, rank: int, backend: str = "") -> RankLayout:
        return RankLayout(rank, self.group_page_bytes, self.digest, backend)


def layer_pages(name: str, views: Sequence[TensorView], num_blocks: int, page_bytes: int) -> Layer:
    """The pages of one layer.

    Args:
        views: the layer's tensors; several for a recurrent layer's states, which share a page.
        page_bytes: bytes of one block of this layer, padding included, as vLLM's spec says.

    Raises:
        ConfigError: no dimension of the tensor fits `num_blocks` pages of `page_bytes`, or the pool is so small that
            blocks cannot be told from keys and values.
    """
    dimension, segments = (_states_of if len(views) > 1 else _blocks_of)(name, views, num_blocks, page_bytes)
    start = min(view.offset for view in views)
    described = "; ".join(f"+{view.offset - start} {_described(view, dimension, num_blocks)}" for view in views)
    return Layer(name, segments, described)


_Fit = tuple[int, tuple[Segment, ...]]  # the blocks dimension, and the segments of a page


def _states_of(name: str, views: Sequence[TensorView], num_blocks: int, page_bytes: int) -> _Fit:
    """Several states share one page; blocks are their first dimension."""
    strides = {view.strides[0] for view in views}
    first = min(views, key=lambda view: view.offset)
    ends = [view.offset - first.offset + _extent(view, range(1, len(view.shape))) for view in views]
    same_memory = len({view.buffer for view in views}) == 1
    if not same_memory or len(strides) != 1 or first.strides[0] < page_bytes or max(ends) > page_bytes:
        raise ConfigError(_unknown(name, views, num_blocks, page_bytes))
    if any(view.shape[0] != num_blocks for view in views):
        raise ConfigError(_unknown(name, views, num_blocks, page_bytes))
    return 0, (Segment(first.buffer, first.offset, first.strides[0], page_bytes),)


def _blocks_of(name: str, views: Sequence[TensorView], num_blocks: int, page_bytes: int) -> _Fit:
    """One tensor is the page, or its segments; blocks are the first dimension that fits.

    vLLM's blocks are dimension 0, or 1 behind keys and values. So dimension 0 is mistaken for them only where there are
    no more blocks than 2; that is refused, not guessed.
    """
    (view,) = views
    fits = {
        dimension: segments
        for dimension in range(len(view.shape))
        if (segments := _split_at(view, dimension, num_blocks, page_bytes))
    }
    if not fits:
        raise ConfigError(_unknown(name, [view], num_blocks, page_bytes))
    if num_blocks <= 2 and len(set(fits.values())) > 1:
        raise ConfigError(
            f"the KV cache has only {num_blocks} blocks: the layout of layer {name} (shape {view.shape}, strides"
            f" {view.strides} bytes) could be read in more than one way; give vLLM more memory for its KV cache"
        )
    return next(iter(fits.items()))


def _split_at(view: TensorView, dimension: int, num_blocks: int, page_bytes: int) -> tuple[Segment, ...] | None:
    """The segments of a page if this is the blocks dimension, else None."""
    size = view.shape[dimension]
    if size < num_blocks or size % num_blocks:
        return None
    kernel_blocks = size // num_blocks
    stride = view.strides[dimension] * kernel_blocks
    outer, inner = _around(view, dimension)
    count = prod(view.shape[d] for d in outer)
    length, rest = divmod(page_bytes, count)
    content = _extent(view, inner) + (kernel_blocks - 1) * view.strides[dimension]
    if rest or not content <= length <= stride or (kernel_blocks > 1 and length != stride):
        return None
    offsets = [
        sum(index * view.strides[d] for index, d in zip(indices, outer, strict=True))
        for indices in itertools.product(*(range(view.shape[d]) for d in outer))
    ]
    return tuple(Segment(view.buffer, view.offset + offset, stride, length) for offset in offsets)


def _around(view: TensorView, dimension: int) -> tuple[list[int], list[int]]:
    """Dimensions that cut a page into segments, and those inside of a segment, if `dimension` is that of the blocks."""
    others = [d for d in range(len(view.shape)) if d != dimension and view.shape[d] > 1]
    outer = [d for d in others if view.strides[d] > view.strides[dimension]]
    return outer, [d for d in others if d not in outer]


def _extent(view: TensorView, dimensions: Sequence[int]) -> int:
    """Bytes from the first to the end of the last element along these dimensions."""
    return sum((view.shape[d] - 1) * view.strides[d] for d in dimensions) + view.itemsize


def _described(view: TensorView, dimension: int, num_blocks: int) -> str:
    """What lies where in a page: each dimension's size, and its stride where that lies inside of a segment.

    Strides of segments are left out, since they grow with the number of blocks, and so are those of single elements,
    which mean nothing.
    """
    _, inner = _around(view, dimension)
    parts = [str(size) + (f"@{view.strides[d]}" if d in inner else "") for d, size in enumerate(view.shape)]
    parts[dimension] = f"{view.shape[dimension] // num_blocks}*blocks"
    return f"{view.dtype} [{', '.join(parts)}]"


def _unknown(name: str, views: Sequence[TensorView], num_blocks: int, page_bytes: int) -> str:
    shapes = ", ".join(f"shape {view.shape} strides {view.strides} bytes" for view in views)
    return (
        f"the KV cache of layer {name} has a layout that is not known: {shapes}; expected {num_blocks} blocks of"
        f" {page_bytes} bytes. Another --attention-backend or VLLM_KV_CACHE_LAYOUT may have one that is"
    )
