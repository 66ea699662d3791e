"""Stand-ins for the two kinds of memory that a worker copies between: a server's pool file and KV cache tensors."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from lmcache_mp_safe.contract import SHARED_MEMORY, PoolSegment
from lmcache_mp_safe.geometry.pages import Layer, PageLayout, Segment
from lmcache_mp_safe.geometry.payload import ObjectLayout
from lmcache_mp_safe.ids import ServerEpoch


@contextlib.contextmanager
def pool_file(size: int, layout: ObjectLayout, epoch: int = 1) -> Iterator[PoolSegment]:
    """A shared-memory file of this size, as a server would own it."""
    name = f"lmcache_mp_safe_test_{uuid.uuid4().hex}"
    path = SHARED_MEMORY / name
    path.touch(mode=0o600)
    os.truncate(path, size)
    slices = tuple((part.offset, part.size) for part in layout.slices)
    try:
        yield PoolSegment(ServerEpoch(epoch), name, size, path.stat().st_ino, slices)
    finally:
        path.unlink(missing_ok=True)


def random_buffer(size: int, seed: int = 0) -> torch.Tensor:
    """A flat uint8 buffer of random bytes."""
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))


def simple_pages(groups: Sequence[Sequence[int]], num_blocks: int) -> tuple[PageLayout, int]:
    """Layers with pages of these sizes (bytes, one number a layer, grouped), laid out one layer after the other.

    Returns:
        The layout, and the size of the buffer it needs.
    """
    offset = 0
    built: list[tuple[Layer, ...]] = []
    for number, layers in enumerate(groups):
        made: list[Layer] = []
        for index, page in enumerate(layers):
            made.append(Layer(f"g{number}.l{index}", (Segment(0, offset, page, page),), "uint8"))
            offset += page * num_blocks
        built.append(tuple(made))
    return PageLayout(tuple(built), num_blocks), offset
