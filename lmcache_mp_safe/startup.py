"""What happens once, when an engine starts: build the worker half, connect to the server, say so on one screen."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import vllm

from lmcache_mp_safe import __version__
from lmcache_mp_safe.compat.features import HostFeatures
from lmcache_mp_safe.compat.model import rank_place
from lmcache_mp_safe.config import SERVER_COMMAND, SafeConfig
from lmcache_mp_safe.contract import RankLayout
from lmcache_mp_safe.errors import ConfigError
from lmcache_mp_safe.geometry.groups import ModelGeometry
from lmcache_mp_safe.scheduler.half import SchedulerHalf

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from lmcache_mp_safe.worker.half import WorkerHalf

# A child of vLLM's logger, so that vLLM's own handlers and level show it.
logger = logging.getLogger("vllm.lmcache_mp_safe")


def recompute_failed_loads(transfer: KVTransferConfig) -> None:
    """A lost cache entry must cost a recomputation, not a request: vLLM's default policy is `fail`.

    vLLM reads the policy right after it has constructed the connector.
    """
    if transfer.kv_load_failure_policy != "recompute":
        transfer.kv_load_failure_policy = "recompute"
        logger.info("kv_load_failure_policy set to 'recompute' (it was 'fail')")


def make_worker_half(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    kv_caches: dict[str, Any],
    geometry: ModelGeometry,
    config: SafeConfig,
) -> tuple[WorkerHalf, RankLayout]:
    """The worker half over the KV cache tensors that vLLM registered, and their layout for the scheduler.

    Raises:
        ConfigError: the tensors have a layout or lie on a device that cannot be served.
    """
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    from lmcache_mp_safe.ops import choose_backend
    from lmcache_mp_safe.ops.streamed import StreamedBackend
    from lmcache_mp_safe.worker.caches import page_layout
    from lmcache_mp_safe.worker.copy_thread import CopyThread
    from lmcache_mp_safe.worker.half import WorkerHalf

    place = rank_place(vllm_config, get_tp_group().rank_in_group, get_pp_group().rank_in_group)
    pages, buffers = page_layout(kv_cache_config, kv_caches, geometry)
    backend = choose_backend(buffers, config.backend, config.staging_bytes)
    queue = CopyThread(backend.enter_thread) if isinstance(backend, StreamedBackend) else None
    worker = WorkerHalf(rank=place.rank, pages=pages, backend=backend, integrity=config.integrity, queue=queue)
    return worker, pages.rank_layout(place.rank, backend=f"{backend.name} ({backend.why})")


def connect(half: SchedulerHalf, config: SafeConfig) -> None:
    """Wait for the server and the proof that its pool is the one mapped here.

    Raises:
        ConfigError: the server cannot be reached or used; says why and gives the command that starts one.
    """
    if half.wait_until_up(config.connect_timeout_s, time.sleep):
        return
    why = half.wire.why_down or "no answer"
    message = f"LMCache server {config.server_url}: {why}. Start it with: {SERVER_COMMAND}"
    if config.require_server:
        half.shutdown(1.0)
        raise ConfigError(
            f"{message}. To start vLLM without a server and use one when it appears, set"
            ' "lmcache.mp.safe.require_server": false'
        )
    logger.warning("%s. Requests are computed without it until it answers", message)


def log_report(
    vllm_config: VllmConfig,
    config: SafeConfig,
    geometry: ModelGeometry,
    half: SchedulerHalf,
    namespace: str,
    features: HostFeatures,
    ranks: Sequence[RankLayout],
) -> None:
    """One screen that says what was found and chosen."""
    segment = half.wire.segment
    speculative = vllm_config.speculative_config
    groups = [
        f"{i}: {group.kind.value}, {group.block_tokens} tokens a block" for i, group in enumerate(geometry.groups)
    ]
    rows = [
        ("versions", f"lmcache_mp_safe {__version__}, vLLM {vllm.__version__}, LMCache {version('lmcache')}"),
        *[("KV group" if i == 0 else "", text) for i, text in enumerate(groups)],
        ("chunk", f"{geometry.chunk_tokens} tokens; object {half.objects.layout.object_bytes / 2**20:.2f} MiB"),
        ("ranks", f"{len(ranks)}; copies by {ranks[0].backend}"),
        ("namespace", namespace),
        (
            "server",
            f"{config.server_url}, pool {segment.name} of {segment.size / 2**30:.1f} GiB" if segment else "down",
        ),
        ("speculation", "off" if speculative is None else f"{speculative.method}"),
        ("integrity", config.integrity.value),
        ("hybrid hits", "supports_divergent_local_hybrid_hits = False"),
        ("lookup path", features.lookup_path),
        ("stores", "prompt and decoded tokens" if config.save_decode_cache else "prompt tokens"),
    ]
    logger.info("LMCacheMPSafeConnector\n%s", "\n".join(f"  {name:<13}{text}" for name, text in rows))
