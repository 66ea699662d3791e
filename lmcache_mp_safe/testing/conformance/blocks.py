"""vLLM's block pool: what the scheduler half takes for granted about it, and about `testing/world.FakePool`."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lmcache_mp_safe.compat.requests import HostBlockPool
from lmcache_mp_safe.testing.world import FakePool

BLOCKS = 8  # one of them is the null block


class PoolSubject(Protocol):
    """A pool, and what an engine does to it. `view` is what the scheduler half sees."""

    view: Any

    def take(self) -> Any: ...
    def cache(self, block: Any, name: str, group: int) -> None: ...
    def free_blocks(self) -> int: ...


class FakePoolSubject:
    """The pool of `testing/world`."""

    def __init__(self) -> None:
        self.view = FakePool(BLOCKS)

    def take(self) -> Any:
        return self.view.take()

    def cache(self, block: Any, name: str, group: int) -> None:
        self.view.cache(block, hash_of(name), group)

    def free_blocks(self) -> int:
        return len(self.view.free)


class RealPoolSubject:
    """vLLM's own, seen through `compat`."""

    def __init__(self) -> None:
        from vllm.v1.core.block_pool import BlockPool

        self._pool = BlockPool(BLOCKS, True, 1)
        self.view = HostBlockPool(self._pool)

    def take(self) -> Any:
        (block,) = self._pool.get_new_blocks(1)
        return block

    def cache(self, block: Any, name: str, group: int) -> None:
        class Request:
            block_hashes: Sequence[bytes] = (hash_of(name),)

        self._pool.cache_full_blocks(Request(), [block], 0, 1, 1, group)

    def free_blocks(self) -> int:
        return int(self._pool.get_num_free_blocks())


def hash_of(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def a_block_is_found_by_its_hash_and_its_group(pool: PoolSubject) -> None:
    block = pool.take()
    pool.cache(block, "prefix", 1)
    assert found(pool, "prefix", 1) is block
    assert found(pool, "prefix", 0) is None
    assert found(pool, "other", 1) is None


def of_two_blocks_with_one_hash_the_first_is_found(pool: PoolSubject) -> None:
    first, second = pool.take(), pool.take()
    pool.cache(first, "prefix", 0)
    pool.cache(second, "prefix", 0)
    assert found(pool, "prefix", 0) is first


def of_two_blocks_with_one_hash_the_second_is_found_when_the_first_is_gone(pool: PoolSubject) -> None:
    first, second = pool.take(), pool.take()
    pool.cache(first, "prefix", 0)
    pool.cache(second, "prefix", 0)
    pool.view.unpin([first])
    hand_all_out(pool)
    assert found(pool, "prefix", 0) is second


def a_freed_block_is_found_until_it_is_handed_out_again(pool: PoolSubject) -> None:
    block = pool.take()
    pool.cache(block, "prefix", 0)
    pool.view.unpin([block])
    assert found(pool, "prefix", 0) is block
    assert all(one.block_hash is None for one in hand_all_out(pool))
    assert found(pool, "prefix", 0) is None


def a_pinned_block_is_not_handed_out_and_keeps_its_hash(pool: PoolSubject) -> None:
    block = pool.take()
    pool.cache(block, "prefix", 0)
    pool.view.pin([block])
    pool.view.unpin([block])  # its request ends
    assert block not in hand_all_out(pool)
    assert found(pool, "prefix", 0) is block


def a_free_block_that_is_pinned_leaves_the_free_ones(pool: PoolSubject) -> None:
    block = pool.take()
    pool.cache(block, "prefix", 0)
    pool.view.unpin([block])
    before = pool.free_blocks()
    pool.view.pin([block])
    assert pool.free_blocks() == before - 1
    pool.view.unpin([block])
    assert pool.free_blocks() == before


def pins_are_counted(pool: PoolSubject) -> None:
    block = pool.take()
    pool.view.pin([block])
    pool.view.pin([block])
    assert block.ref_cnt == 3
    before = pool.free_blocks()
    pool.view.unpin([block])
    pool.view.unpin([block])
    assert pool.free_blocks() == before
    pool.view.unpin([block])
    assert pool.free_blocks() == before + 1


def cached_blocks_are_handed_out_in_the_order_in_which_they_were_freed(pool: PoolSubject) -> None:
    blocks = [pool.take() for _ in range(BLOCKS - 1)]
    for number, block in enumerate(blocks):
        pool.cache(block, f"prefix {number}", 0)
    for block in blocks:
        pool.view.unpin([block])
    assert hand_all_out(pool) == blocks


def of_blocks_that_are_freed_together_the_last_is_handed_out_first(pool: PoolSubject) -> None:
    blocks = [pool.take() for _ in range(BLOCKS - 1)]
    for number, block in enumerate(blocks):
        pool.cache(block, f"prefix {number}", 0)
    pool.view.unpin(blocks)
    assert hand_all_out(pool) == blocks[::-1]


def a_block_without_a_hash_is_handed_out_next(pool: PoolSubject) -> None:
    block = pool.take()
    pool.view.unpin([block])
    assert pool.take() is block


def the_null_block_is_never_handed_out(pool: PoolSubject) -> None:
    taken = hand_all_out(pool)
    assert len(taken) == BLOCKS - 1
    assert not any(block.is_null for block in taken)
    assert pool.view.total_blocks == BLOCKS


def several_hashes_are_found_all_together_or_not_at_all(pool: PoolSubject) -> None:
    blocks = [pool.take(), pool.take()]
    for name, block in zip(("a", "b"), blocks, strict=True):
        pool.cache(block, name, 0)
    assert pool.view.find_all([hash_of("a"), hash_of("b")], 0) == blocks
    assert not pool.view.find_all([hash_of("a"), hash_of("none"), hash_of("b")], 0)


def found(pool: PoolSubject, name: str, group: int) -> Any | None:
    blocks = pool.view.find_all([hash_of(name)], group)
    return blocks[0] if blocks else None


def hand_all_out(pool: PoolSubject) -> list[Any]:
    return [pool.take() for _ in range(pool.free_blocks())]


POOL_BEHAVIOURS: tuple[Callable[[PoolSubject], None], ...] = (
    a_block_is_found_by_its_hash_and_its_group,
    of_two_blocks_with_one_hash_the_first_is_found,
    of_two_blocks_with_one_hash_the_second_is_found_when_the_first_is_gone,
    a_freed_block_is_found_until_it_is_handed_out_again,
    a_pinned_block_is_not_handed_out_and_keeps_its_hash,
    a_free_block_that_is_pinned_leaves_the_free_ones,
    pins_are_counted,
    cached_blocks_are_handed_out_in_the_order_in_which_they_were_freed,
    of_blocks_that_are_freed_together_the_last_is_handed_out_first,
    a_block_without_a_hash_is_handed_out_next,
    the_null_block_is_never_handed_out,
    several_hashes_are_found_all_together_or_not_at_all,
)
