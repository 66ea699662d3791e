"""vLLM around the connector: its own configuration, Scheduler, KVCacheManager and BlockPool.

The configuration comes from a tiny model once a process; what a world varies is set on copies. KV cache groups are made
by hand: what a group is called on a GPU (layers, dtypes, strides) plays no part in scheduling.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.structured_output import StructuredOutputManager

from lmcache_mp_safe.connector import LMCacheMPSafeConnector
from lmcache_mp_safe.ids import ServerEpoch
from lmcache_mp_safe.testing.models import write_model
from lmcache_mp_safe.testing.sim.settings import Drafter, Settings
from lmcache_mp_safe.testing.sim.tokens import BLOCK
from lmcache_mp_safe.wire import Wire
from lmcache_mp_safe.worker.half import WorkerHalf

WINDOW = 20
MAX_TOKENS = 512
MAX_REQUESTS = 6
LAYERS = {"full": 2, "state": 1, "window": 1}

_GROUPS = {
    "hybrid": ("full", "state"),
    "two-states": ("full", "state", "state"),
    "attention": ("full",),
    "window": ("full", "window"),
    "recurrent": ("state",),
}


def groups_of(settings: Settings) -> tuple[str, ...]:
    """Kind of each KV cache group."""
    return _GROUPS[settings.shape]


class SimConnector(LMCacheMPSafeConnector):
    """The connector with a clock and connections that the simulator makes."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
        *,
        clock: Callable[[], float],
        maker: Callable[[], Any],
        worker: WorkerHalf | None = None,
    ) -> None:
        self._clock = clock
        self._sim_maker = maker
        super().__init__(vllm_config, role, kv_cache_config)
        self._worker = worker

    def make_wire(self, object_bytes: int, generation: str, first_epoch: ServerEpoch) -> Wire:
        return Wire(self.wire_config(object_bytes, generation, first_epoch), maker=self._sim_maker())


def kv_cache_config(settings: Settings) -> KVCacheConfig:
    """Groups and blocks of the world's model."""
    groups = [
        KVCacheGroupSpec(
            [f"g{index}.l{layer}" for layer in range(LAYERS[kind])],
            _spec(kind, settings),
            is_eagle_group=settings.drafter == "mtp" and kind == "full",
        )
        for index, kind in enumerate(groups_of(settings))
    ]
    return KVCacheConfig(
        settings.blocks,
        [],
        groups,
        prefix_cache_retention_interval=None if settings.retention < 0 else settings.retention,
        hash_block_size=BLOCK,
        cache_hit_alignment_tokens=BLOCK,
    )


def _spec(kind: str, settings: Settings) -> KVCacheSpec:
    if kind == "state":
        return MambaSpec(
            block_size=BLOCK,
            shapes=((settings.state_words,),),
            dtypes=(torch.int64,),
            mamba_cache_mode="align",
            num_speculative_blocks=settings.drafts,
        )
    shape: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 4, "dtype": torch.int8}
    if kind == "window":
        return SlidingWindowSpec(**shape, sliding_window=WINDOW)
    return FullAttentionSpec(**shape)


def vllm_config(settings: Settings) -> VllmConfig:
    """vLLM's configuration for the world."""
    config = copy.copy(_base(settings.drafter))
    config.cache_config = copy.copy(config.cache_config)
    config.cache_config.block_size = BLOCK
    config.cache_config.mamba_block_size = BLOCK
    config.cache_config.num_gpu_blocks = settings.blocks
    config.scheduler_config = copy.copy(config.scheduler_config)
    config.scheduler_config.max_num_batched_tokens = settings.step_tokens
    config.scheduler_config.async_scheduling = settings.overlap
    if config.speculative_config is not None:
        config.speculative_config = copy.copy(config.speculative_config)
        config.speculative_config.num_speculative_tokens = settings.drafts
    config.kv_transfer_config = copy.copy(config.kv_transfer_config) if settings.connector else None
    if config.kv_transfer_config is not None:
        config.kv_transfer_config.kv_connector_extra_config = {
            "lmcache.mp.safe.chunk_tokens": settings.chunk_tokens,
            "lmcache.mp.save_decode_cache": settings.save_decode,
            "lmcache.mp.eager_prefetch": settings.eager,
            "lmcache.mp.safe.pin_fraction": settings.pin_fraction,
        }
    return config


@functools.cache
def _base(drafter: Drafter) -> VllmConfig:
    init_none_hash(sha256)
    speculation: dict[Drafter, dict[str, Any] | None] = {
        "none": None,
        "ngram": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2},
        "mtp": {"method": "mtp", "num_speculative_tokens": 2},
    }
    with tempfile.TemporaryDirectory() as path:
        write_model("hybrid", path)
        return EngineArgs(
            model=path,
            skip_tokenizer_init=True,
            enable_prefix_caching=True,
            max_model_len=MAX_TOKENS,
            max_num_batched_tokens=64,
            max_num_seqs=MAX_REQUESTS,
            block_size=BLOCK,
            mamba_cache_mode="align",
            async_scheduling=False,
            speculative_config=speculation[drafter],
            kv_transfer_config={"kv_connector": "LMCacheMPSafeConnector", "kv_role": "kv_both"},
        ).create_engine_config()


def make_scheduler(
    config: VllmConfig, groups: KVCacheConfig, settings: Settings, clock: Callable[[], float], maker: Callable[[], Any]
) -> Scheduler:
    """vLLM's own, with the connector's scheduler side in it."""

    def create(config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> SimConnector:
        return SimConnector(config, role, kv_cache_config, clock=clock, maker=maker)

    kind = AsyncScheduler if settings.overlap else Scheduler
    with mock.patch.object(KVConnectorFactory, "create_connector", create):
        return kind(config, groups, _no_grammars(), block_size=BLOCK, hash_block_size=BLOCK)


@functools.cache
def _no_grammars() -> StructuredOutputManager:
    return StructuredOutputManager(_base("none"))


@functools.cache
def block_hasher() -> Callable[[Any], Any]:
    hasher: Callable[[Any], Any] = get_request_block_hasher(BLOCK, sha256)
    return hasher
