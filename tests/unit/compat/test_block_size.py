"""The block size that vLLM's scheduler cuts by stays the one of the recurrent states."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from lmcache_mp_safe.compat.block_size import StepBlockSize
from lmcache_mp_safe.geometry.groups import Group, GroupKind, ModelGeometry

BLOCK = 640
STATES, PAGES = Group(GroupKind.RECURRENT, BLOCK), Group(GroupKind.APPEND_ONLY, BLOCK)
HYBRID, ATTENTION = ModelGeometry.of([STATES, PAGES], 256), ModelGeometry.of([PAGES], 256)


def cache(mode: str = "align", block_size: int = BLOCK) -> SimpleNamespace:
    return SimpleNamespace(block_size=block_size, mamba_cache_mode=mode)


def test_block_size_that_vllm_changes_is_put_back_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    config = cache()
    kept = StepBlockSize(config, HYBRID)
    kept.keep()
    assert caplog.records == []
    config.block_size = 128
    with caplog.at_level(logging.WARNING):
        kept.keep()
        kept.keep()
    assert config.block_size == BLOCK
    assert len(caplog.records) == 1


def test_steps_end_where_states_are_kept_although_another_group_has_shorter_blocks() -> None:
    config = cache(block_size=64)
    StepBlockSize(config, ModelGeometry.of([STATES, PAGES, Group(GroupKind.WINDOW, 64, 128)], 256)).keep()
    assert config.block_size == BLOCK


@pytest.mark.parametrize(("geometry", "mode"), [(ATTENTION, "none"), (ATTENTION, "align"), (HYBRID, "all")])
def test_block_size_is_vllms_own_affair_where_no_state_depends_on_it(geometry: ModelGeometry, mode: str) -> None:
    config = cache(mode, block_size=128)
    StepBlockSize(config, geometry).keep()
    assert config.block_size == 128
