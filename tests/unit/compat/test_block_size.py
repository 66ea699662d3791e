"""The block size that vLLM's scheduler cuts by stays the one of the recurrent states."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from lmcache_mp_safe.compat.block_size import ResolvedBlockSize
from lmcache_mp_safe.errors import ConfigError
from lmcache_mp_safe.geometry.groups import Group, GroupKind, ModelGeometry

BLOCK = 640
HYBRID = ModelGeometry.of([Group(GroupKind.RECURRENT, BLOCK), Group(GroupKind.APPEND_ONLY, BLOCK)], 256)
ATTENTION = ModelGeometry.of([Group(GroupKind.APPEND_ONLY, BLOCK)], 256)


def cache(mode: str = "align", block_size: int = BLOCK) -> SimpleNamespace:
    return SimpleNamespace(block_size=block_size, mamba_cache_mode=mode)


def test_block_size_that_vllm_changes_is_put_back_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    config = cache()
    kept = ResolvedBlockSize(config, HYBRID)
    kept.keep()
    assert caplog.records == []
    config.block_size = 128
    with caplog.at_level(logging.WARNING):
        kept.keep()
        kept.keep()
    assert config.block_size == BLOCK
    (record,) = caplog.records
    assert f"--block-size {BLOCK}" in record.getMessage()


@pytest.mark.parametrize(("geometry", "mode"), [(ATTENTION, "none"), (ATTENTION, "align"), (HYBRID, "all")])
def test_block_size_is_vllms_own_affair_where_no_state_depends_on_it(geometry: ModelGeometry, mode: str) -> None:
    config = cache(mode)
    kept = ResolvedBlockSize(config, geometry)
    config.block_size = 128
    kept.keep()
    assert config.block_size == 128


def test_steps_that_would_not_end_where_states_are_kept_are_refused() -> None:
    with pytest.raises(ConfigError, match=f"--block-size {BLOCK}"):
        ResolvedBlockSize(cache(block_size=128), HYBRID)
