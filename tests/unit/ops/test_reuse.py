"""What is asked of the driver once and used again: small blocks of page-locked memory, and events."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lmcache_mp_safe.ops.device import Bytes
from lmcache_mp_safe.ops.host_blocks import HostBlock, HostBlocks
from lmcache_mp_safe.ops.torch_device import EventPool


@given(st.lists(st.integers(0, 3000), max_size=60), st.integers(0, 10**6))
def test_blocks_that_somebody_holds_never_overlap(sizes: list[int], seed: int) -> None:
    random, blocks = Random(seed), HostBlocks(lambda size: np.zeros(size, np.uint8))
    held: list[tuple[HostBlock, int]] = []
    for number, words in enumerate(sizes):
        block = blocks.take(words)
        assert len(block.words) == words
        block.words[:] = number
        held.append((block, number))
        if random.random() < 0.5:
            held.pop(random.randrange(len(held)))
        assert all((block.words == number).all() for block, number in held)


def test_driver_is_asked_for_few_and_large_pieces() -> None:
    asked: list[int] = []

    def allocate(size: int) -> Bytes:
        asked.append(size)
        return np.zeros(size, np.uint8)

    blocks = HostBlocks(allocate)
    for _ in range(20):
        held = [blocks.take(11_250) for _ in range(32)]  # digests of 32 objects of 184 MB
        del held
    assert asked == [4 << 20]
    assert len(blocks.take(1 << 20).words) == 1 << 20
    assert asked == [4 << 20, 8 << 20]


def test_event_is_used_again_once_nobody_has_its_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", object)
    pool = EventPool()
    first, second = pool.take(), pool.take()
    assert first.event is not second.event
    event = first.event
    del first
    third = pool.take()
    assert third.event is event
    assert pool.take().event is not event
