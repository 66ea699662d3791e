"""What this package takes for granted about vLLM's block pool, of the stand-in and of the real one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from lmcache_mp_safe.testing.conformance.blocks import POOL_BEHAVIOURS, FakePoolSubject, RealPoolSubject
from lmcache_mp_safe.testing.world import FakeBlock, FakePool

Patch = pytest.MonkeyPatch


@pytest.mark.parametrize("subject", [FakePoolSubject, RealPoolSubject])
@pytest.mark.parametrize("behaviour", POOL_BEHAVIOURS, ids=lambda one: one.__name__)
def test_block_pool(behaviour: Callable[[Any], None], subject: Callable[[], Any]) -> None:
    behaviour(subject())


def hands_out_pinned_blocks(patch: Patch) -> None:
    def pin(self: FakePool, blocks: Sequence[FakeBlock]) -> None:
        for block in blocks:
            block.ref_cnt += 1

    patch.setattr(FakePool, "pin", pin)


def forgets_hashes_of_freed_blocks(patch: Patch) -> None:
    honest = FakePool.unpin

    def unpin(self: FakePool, blocks: Sequence[FakeBlock]) -> None:
        honest(self, blocks)
        for block in blocks:
            if not block.ref_cnt:
                self.uncache(block)

    patch.setattr(FakePool, "unpin", unpin)


def keeps_hashes_of_reused_blocks(patch: Patch) -> None:
    patch.setattr(FakePool, "uncache", lambda self, block: None)


def ignores_groups(patch: Patch) -> None:
    honest = FakePool.cache
    patch.setattr(FakePool, "cache", lambda self, block, block_hash, group: honest(self, block, block_hash, 0))


@pytest.mark.parametrize(
    ("lie", "name"),
    [
        (hands_out_pinned_blocks, "a_free_block_that_is_pinned_leaves_the_free_ones"),
        (forgets_hashes_of_freed_blocks, "a_freed_block_is_found_until_it_is_handed_out_again"),
        (keeps_hashes_of_reused_blocks, "a_freed_block_is_found_until_it_is_handed_out_again"),
        (ignores_groups, "a_block_is_found_by_its_hash_and_its_group"),
    ],
)
def test_a_lie_is_noticed_by_the_behaviour_that_it_contradicts(
    lie: Callable[[Patch], None], name: str, monkeypatch: Patch
) -> None:
    lie(monkeypatch)
    (behaviour,) = [one for one in POOL_BEHAVIOURS if one.__name__ == name]
    with pytest.raises(AssertionError):
        behaviour(FakePoolSubject())
