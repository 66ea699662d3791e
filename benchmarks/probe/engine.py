"""The engine of one probe: `testing.engine.Engine` with what a GPU needs."""

from __future__ import annotations

import logging
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.probe.options import Options
from lmcache_mp_safe.testing.engine import Engine, EngineSpec
from lmcache_mp_safe.testing.server import LMCacheServer


def prepare_import(options: Options) -> None:
    """Before vLLM is imported."""
    if options.device == "cuda" and not options.autotune:
        from benchmarks.engine_child import first_choice_only

        first_choice_only()


def make_engine(options: Options, server: LMCacheServer | None) -> Engine:
    """In this process, the scheduler too, so that a connector can be looked into."""
    logging.getLogger("vllm.v1.core.block_pool").setLevel(logging.ERROR)  # each refused reset is a warning there
    if options.batch_invariant:
        _allow_batch_invariance()
    engine = Engine(engine_spec(options, server))
    if engine.block_size != options.block_size:
        raise SystemExit(f"vLLM made the block size {engine.block_size}: pass that as --block-size")
    return engine


def _allow_batch_invariance() -> None:
    """vLLM refuses it for the recurrent layers, whose prefill nevertheless keeps it at block boundaries."""
    from vllm.v1.attention.backends.gdn_attn import GDNAttentionBackend

    GDNAttentionBackend.supports_batch_invariance = classmethod(lambda cls: True)


def engine_spec(options: Options, server: LMCacheServer | None) -> EngineSpec:
    return EngineSpec(
        str(options.model or Path(tempfile.mkdtemp(prefix="lmcache_mp_safe_probe_")) / "model"),
        kind="hybrid",
        speculation=options.spec,
        connector=None if server is None else options.connector,  # type: ignore[arg-type]
        connector_extra={} if server is None else connector_extra(options, server),
        block_size=options.block_size if options.device == "cuda" else None,  # on CPU vLLM refuses any but its own
        max_model_len=options.max_model_len,
        max_num_batched_tokens=options.tokens(options.batched_blocks),
        max_num_seqs=max(options.sessions, options.race_sessions, 4),
        num_gpu_blocks_override=options.gpu_blocks or None,
        options=device_options(options),
    )


def connector_extra(options: Options, server: LMCacheServer) -> dict[str, Any]:
    extra: dict[str, Any] = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server.port}
    if options.connector == "stock":
        extra |= {"lmcache.mp.mp_transfer_mode": "lmcache_driven", "lmcache.mp.mq_timeout": 20}
    elif options.chunk_blocks > 1:
        extra["lmcache.mp.safe.chunk_tokens"] = options.tokens(options.chunk_blocks)
    if options.save_decode_cache:
        extra["lmcache.mp.save_decode_cache"] = True
    return extra | options.extra


def device_options(options: Options) -> dict[str, Any]:
    """Arguments of `vllm.LLM` beyond what `EngineSpec` makes."""
    found = _keep_every_state()
    if options.device == "cpu":
        return found
    found |= {
        "enforce_eager": not options.graphs,
        "kv_cache_memory_bytes": int(options.kv_gb * 2**30),
        "gpu_memory_utilization": 0.1,  # without meaning beside the line above, but vLLM wants that much free
    }
    if options.attention:
        found["attention_backend"] = options.attention
    if options.gdn_prefill:
        found["gdn_prefill_backend"] = options.gdn_prefill
    if options.spec == "ngram":
        drafts = options.spec_tokens or 3
        lookup = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
        found["speculative_config"] = {"method": "ngram", "num_speculative_tokens": drafts, **lookup}
    elif options.spec == "mtp":
        found["speculative_config"] = {"method": "mtp", "num_speculative_tokens": options.spec_tokens or 2}
    return found


def _keep_every_state() -> dict[str, Any]:
    """A state at every boundary, as vLLM 0.26 does by itself: newer ones keep a prompt's last one only."""
    from vllm.config import CacheConfig

    name = "prefix_cache_retention_interval"
    return {name: None} if name in CacheConfig.__dataclass_fields__ else {}


def facts(engine: Engine) -> dict[str, Any]:
    """What vLLM made of the options."""
    scheduler, cache = engine.vllm_config.scheduler_config, engine.vllm_config.cache_config
    found = {
        "block_size": engine.block_size,
        "gpu_blocks": cache.num_gpu_blocks,
        "batched_tokens": scheduler.max_num_batched_tokens,
        "async_scheduling": bool(scheduler.async_scheduling),
        "steps_overlap": engine._core.batch_queue is not None,
        "eager": bool(engine.vllm_config.model_config.enforce_eager),
        "groups": [f"{group.spec} x {len(group.layers)}" for group in engine.groups],
    }
    if engine.spec.connector == "safe":
        backend = engine.worker_connector.worker_half._backend
        found["copies by"] = f"{backend.name} ({backend.why})"
    return found
