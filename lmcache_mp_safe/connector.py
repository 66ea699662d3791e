"""`LMCacheMPSafeConnector`: every vLLM hook in a few lines, view -> half -> answer."""

from __future__ import annotations

import functools
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from lmcache_mp_safe import startup
from lmcache_mp_safe.announcements import Announcements
from lmcache_mp_safe.compat.block_size import StepBlockSize
from lmcache_mp_safe.compat.events import events_of, wants_events
from lmcache_mp_safe.compat.features import probe
from lmcache_mp_safe.compat.gate import install
from lmcache_mp_safe.compat.model import geometry_of, hit_margin_tokens, naming_facts
from lmcache_mp_safe.compat.requests import HostBlockPool, HostRequest, cached_token_stats
from lmcache_mp_safe.compat.stats import SafePromMetrics, SafeStats
from lmcache_mp_safe.config import SafeConfig, parse_config
from lmcache_mp_safe.contract import RankLayout, StepPlan, StepReport
from lmcache_mp_safe.errors import ConfigError
from lmcache_mp_safe.identity import namespace
from lmcache_mp_safe.ids import RequestId, ServerEpoch
from lmcache_mp_safe.metrics.tally import Tally
from lmcache_mp_safe.scheduler.half import Role, SchedulerHalf
from lmcache_mp_safe.wire import Wire, WireConfig
from lmcache_mp_safe.worker.half import WorkerHalf

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.lmcache_mp_safe")

_SHUTDOWN_S = 5.0


@dataclass
class PlanMetadata(KVConnectorMetadata):
    """A `StepPlan` in vLLM's wrapping."""

    plan: StepPlan


@dataclass
class ReportMetadata(KVConnectorWorkerMetadata):
    """A `StepReport` in vLLM's wrapping."""

    report: StepReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> ReportMetadata:
        assert isinstance(other, ReportMetadata)
        return ReportMetadata(self.report.merged(other.report))


@dataclass
class LayoutMetadata(KVConnectorHandshakeMetadata):
    """A `RankLayout` in vLLM's wrapping."""

    layout: RankLayout


class LMCacheMPSafeConnector(KVConnectorBase_V1, SupportsHMA):
    """KV connector that keeps exactly what vLLM's own prefix cache would serve in an LMCache server.

    Raises:
        ConfigError: at construction or at the handshake, for anything that cannot be served; names what to change.
    """

    _clock: Callable[[], float] = staticmethod(time.monotonic)  # a simulator has time of its own

    # vLLM 0.28 and newer ask this before they let an attention hit run deeper than a recurrent state. An external hit
    # here always brings the state itself, but a local state is never completed: hits of all groups are reconciled.
    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return False

    @property
    def requires_kv_delivery(self) -> bool:
        """False: this is a cache; losing an entry is no reason to touch a request."""
        return False

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        self._config: SafeConfig = parse_config(transfer.kv_connector_extra_config)
        self._features = probe()
        self._geometry = geometry_of(vllm_config, kv_cache_config, self._config)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._layout: RankLayout | None = None
        self._failed_loads: set[RequestId] = set()
        self._tally = Tally()  # the scheduler half's and its wires'; a worker half has its own
        if role is KVConnectorRole.SCHEDULER:
            install(self._features)
            self._block_size = StepBlockSize(vllm_config.cache_config, self._geometry)
            startup.recompute_failed_loads(transfer)
            self._scheduler = self._make_scheduler_half()

    def _make_scheduler_half(self) -> SchedulerHalf:
        transfer = self._vllm_config.kv_transfer_config
        return SchedulerHalf(
            self._config,
            self._geometry,
            Role(may_load=transfer.is_kv_consumer, may_store=transfer.is_kv_producer),
            make_wire=self.make_wire,
            keep_tokens=2 if self._features.pads_remainder else 1,
            margin_tokens=hit_margin_tokens(self._vllm_config, self._geometry),
            clock=self._clock,
            random_text=functools.partial(secrets.token_hex, 16),
            tally=self._tally,
            announcements=Announcements() if wants_events(self._vllm_config) else None,
        )

    def wire_config(self, object_bytes: int, generation: str, first_epoch: ServerEpoch) -> WireConfig:
        return WireConfig(
            url=self._config.server_url,
            namespace=self._namespace(generation),
            object_bytes=object_bytes,
            call_timeout_s=self._config.call_timeout_s,
            lookup_timeout_s=self._config.lookup_timeout_s,
            heartbeat_s=self._config.heartbeat_s,
            lease_s=self._config.lease_s,
            first_epoch=first_epoch,
        )

    def make_wire(self, object_bytes: int, generation: str, first_epoch: ServerEpoch) -> Wire:
        """The way to the server, for the scheduler half. A benchmark puts a stub of a server in its place."""
        return Wire(self.wire_config(object_bytes, generation, first_epoch), tally=self._tally)

    def _namespace(self, generation: str) -> str:
        facts = naming_facts(self._vllm_config, self._geometry, self._ranks, self._config)
        return namespace(self._vllm_config.model_config.model, facts, generation)

    # --- scheduler side ---------------------------------------------------------------------------------------------

    @property
    def scheduler_half(self) -> SchedulerHalf:
        """The half that decides; only in vLLM's scheduler process."""
        if self._scheduler is None:
            raise ConfigError("this is the worker side of the connector")
        return self._scheduler

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._pool = HostBlockPool(gpu_block_pool)
        self.scheduler_half.bind_pool(self._pool)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Every rank's layout, keyed by (pipeline rank, tensor rank); the server is connected to here."""
        layouts = [layout.layout for layout in metadata.values() if isinstance(layout, LayoutMetadata)]
        self._ranks = tuple(sorted(layouts, key=lambda layout: layout.rank))
        half = self.scheduler_half
        half.set_ranks(self._ranks)
        startup.connect(half, self._config)
        startup.log_report(
            self._vllm_config, self._config, self._geometry, half, self._namespace(""), self._features, self._ranks
        )

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): layout for rank, layout in metadata.items()})

    def _source(self, request: Request) -> HostRequest:
        known = self.scheduler_half.source_of(RequestId(request.request_id))
        if isinstance(known, HostRequest) and known.is_same(request):
            return known
        return HostRequest(request, self._pool.hash_block_tokens)

    def on_new_request(self, request: Request) -> None:
        self.scheduler_half.arrived(self._source(request))

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._block_size.keep()  # vLLM cuts the request's steps after this
        tokens = self.scheduler_half.matched_tokens(self._source(request), num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        tables: Sequence[Sequence[int]] = blocks.get_block_ids() if num_external_tokens else ()
        self.scheduler_half.allocated(self._source(request), num_external_tokens, tables)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> PlanMetadata:
        preempted = bool(scheduler_output.preempted_req_ids)
        return PlanMetadata(self.scheduler_half.build_plan(scheduler_output.num_scheduled_tokens.keys(), preempted))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, ReportMetadata):
            self._failed_loads |= self.scheduler_half.reported(meta.report)

    def take_failed_loads(self) -> set[RequestId]:
        """Requests whose load failed since the last call, for the gate of vLLM versions without a channel for it."""
        failed, self._failed_loads = self._failed_loads, set()
        return failed

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """False: blocks go back to vLLM at once; what is still to be stored survives by its pins.

        A request that asks for `cached_token_stats` in its `kv_transfer_params` gets them back there.
        """
        source = self._source(request)
        cached = self.scheduler_half.cached_tokens(source.request_id)
        self.scheduler_half.finished(source)
        return False, cached_token_stats(cached.local, cached.external) if source.wants_cached_token_stats else None

    def take_events(self) -> list[KVCacheEvent]:
        """KV cache events of acknowledged stores and of objects that are gone, since the last call."""
        return events_of(self.scheduler_half.take_announcements())

    def has_pending_push_work(self) -> bool:
        return self.scheduler_half.has_pending_work

    def has_pending_block_frees(self) -> bool:
        return self.scheduler_half.has_pending_block_frees

    def reset_cache(self) -> bool:
        return self.scheduler_half.reset()

    # --- worker side ------------------------------------------------------------------------------------------------

    @property
    def worker_half(self) -> WorkerHalf:
        """The half that copies; only in vLLM's worker processes."""
        if self._worker is None:
            raise ConfigError("vLLM did not register its KV caches with the connector")
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._worker, self._layout = startup.make_worker_half(
            self._vllm_config, self._kv_cache_config, kv_caches, self._geometry, self._config
        )

    def get_handshake_metadata(self) -> LayoutMetadata | None:
        return None if self._layout is None else LayoutMetadata(self._layout)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """The fence belongs here: every version calls this after all writes of earlier steps are enqueued, and after
        this step's zeroing and state migration, but before its forward. `start_load_kv` may come after the forward."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, PlanMetadata):
            self._worker.begin_step(connector_metadata.plan)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Nothing: see `bind_connector_metadata`."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are always asynchronous."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: whole certified blocks are stored, not layers of a running step."""

    def wait_for_save(self) -> None:
        """Nothing: source blocks are pinned until their copy is reported."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        received = {str(request_id) for request_id in self.worker_half.poll().received}
        return None, received or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """As `get_finished`, with the failed loads; only vLLM 0.32 and newer call it."""
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

        finished = self.worker_half.poll()
        return KVConnectorTransferResults(
            finished_sending=set(),
            finished_recving={str(request_id) for request_id in finished.received},
            failed_recving={str(request_id) for request_id in finished.failed},
        )

    def build_connector_worker_meta(self) -> ReportMetadata | None:
        report = self.worker_half.take_report()
        return None if report is None else ReportMetadata(report)

    # --- both -------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> SafeStats | None:
        """What is new since the last step: of this rank, or of the scheduler half."""
        half = self._scheduler or self._worker
        return None if half is None else SafeStats.of(half.take_sample())

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> SafeStats:
        return SafeStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> SafePromMetrics:
        return SafePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.shutdown(_SHUTDOWN_S)
        if self._worker is not None:
            self._worker.shutdown()
