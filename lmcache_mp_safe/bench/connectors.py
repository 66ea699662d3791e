"""The two connectors with a stub server behind each, a stopwatch for their hooks, and what their workers do."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput

from lmcache_mp_safe.bench.shapes import Shape, kv_cache_config, vllm_config
from lmcache_mp_safe.bench.stub import StubFuture, StubMaker, StubServer
from lmcache_mp_safe.connector import LayoutMetadata, LMCacheMPSafeConnector, ReportMetadata
from lmcache_mp_safe.contract import SKIP, JobOutcome, JobReport, LoadJob, RankLayout, StepReport, StoreJob
from lmcache_mp_safe.geometry.seal import Seal, layout_in
from lmcache_mp_safe.ids import ServerEpoch
from lmcache_mp_safe.wire import Wire

# Neither side's heartbeats and deadlines have a part in what is measured, however busy the machine is.
_EXTRA: dict[str, Any] = {"lmcache.mp.heartbeat_interval": 3600.0, "lmcache.mp.mq_timeout": 3600.0}
_OUR_EXTRA: dict[str, Any] = {"lmcache.mp.safe.lookup_timeout_s": 600.0, "lmcache.mp.safe.lease_s": 200.0}
_TROUBLE = ("internal_errors", "store_calls_failed", "lookups_failed", "leases_over", "slots_abandoned")
_EVENT = bytes(64)  # an interprocess event's handle on the wire


class Stopwatch:
    """Nanoseconds spent in hooks, by phase."""

    def __init__(self) -> None:
        self.spent: Counter[str] = Counter()

    @contextmanager
    def running(self, phase: str) -> Iterator[None]:
        begin = time.thread_time_ns()
        try:
            yield
        finally:
            self.spent[phase] += time.thread_time_ns() - begin


class Side(Protocol):
    """One connector: its server, its scheduler hooks as vLLM has them, and what its workers do between two steps."""

    name: str
    connector: Any
    server: StubServer

    def execute(self, metadata: Any) -> None:
        """What the workers do with the metadata of a step."""

    def report(self) -> KVConnectorOutput:
        """What the workers report after the step, for `update_connector_output`."""

    def take_received(self) -> set[str]:
        """Requests whose load is over, since the last call."""

    def busy(self) -> bool:
        """Whether the engine has to keep stepping."""


class _Ours(LMCacheMPSafeConnector):
    """The connector, with a stub server instead of a connection."""

    stub: StubServer

    def make_wire(self, object_bytes: int, generation: str, first_epoch: ServerEpoch) -> Wire:
        return Wire(self.wire_config(object_bytes, generation, first_epoch), maker=StubMaker(self.stub))


class OurSide:
    """This package's connector. Workers copy at once, and seal what they store."""

    name = "ours"

    def __init__(self, shape: Shape, blocks: int, step_tokens: int, server: StubServer, ranks: int = 1) -> None:
        self.server = server
        config = vllm_config(shape, step_tokens, _EXTRA | _OUR_EXTRA, ranks=ranks)
        self.connector = _Ours(config, KVConnectorRole.SCHEDULER, kv_cache_config(shape, blocks))
        self.connector.stub = server
        self._ranks = [RankLayout(rank, shape.group_page_bytes(ranks), bytes([rank]) * 16) for rank in range(ranks)]
        self._jobs: list[StoreJob | LoadJob] = []
        self._received: set[str] = set()

    def start(self, pool: Any) -> None:
        self.connector.bind_gpu_block_pool(pool)
        layouts = {(0, layout.rank): LayoutMetadata(layout) for layout in self._ranks}
        self.connector.set_xfer_handshake_metadata_pp_aware(layouts)

    def execute(self, metadata: Any) -> None:
        self._jobs += [*metadata.plan.stores, *metadata.plan.loads]
        if self.server.keeps:
            for job in metadata.plan.stores:
                self._seal(job)

    def _seal(self, job: StoreJob) -> None:
        objects, namespace = self.connector.scheduler_half.objects, self.connector.scheduler_half.wire.namespace
        for rank, part in zip(self._ranks, objects.layout.slices, strict=True):
            payload = sum(len(ids) * size for ids, size in zip(job.object.blocks, rank.group_page_bytes, strict=True))
            for piece, slot in enumerate(job.object.slots):
                if slot == SKIP:
                    continue
                self.server.pool.seals[slot + part.seal_offset] = Seal(
                    layout_digest=layout_in(namespace, rank.digest),
                    object_digest=job.object.digest,
                    rank=rank.rank,
                    piece=piece,
                    pieces=len(job.object.slots),
                    payload_bytes=max(0, min(part.capacity, payload - piece * part.capacity)),
                    checksum=0,
                    nonce=bytes(16),
                ).encode()

    def report(self) -> KVConnectorOutput:
        jobs, self._jobs = self._jobs, []
        self._received |= {str(job.request_id) for job in jobs if isinstance(job, LoadJob)}
        reports = tuple(JobReport(job.job_id, rank.rank, JobOutcome.DONE) for job in jobs for rank in self._ranks)
        meta = ReportMetadata(StepReport(jobs=reports)) if reports else None
        return KVConnectorOutput(kv_connector_worker_meta=meta)

    def take_received(self) -> set[str]:
        received, self._received = self._received, set()
        return received

    def busy(self) -> bool:
        return bool(self.connector.has_pending_push_work())

    @property
    def trouble(self) -> dict[str, float]:
        """What went wrong, by counter: such a run says nothing."""
        counters = self.connector.scheduler_half.counters
        return {name: counters[name] for name in _TROUBLE if counters[name]}


@contextmanager
def _stubbed(server: StubServer) -> Iterator[None]:
    """LMCache's factory makes clients of the stub server meanwhile."""
    real = RequestClientFactory.create
    RequestClientFactory.create = staticmethod(lambda url, context=None: server.client())
    try:
        yield
    finally:
        RequestClientFactory.create = real


class _StockTransfer:
    """The worker's transport of the stock connector on a GPU, down to the call: the server copies by itself."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def submit_store(self, request: str, key: Any, caches: Any, blocks: Any, event: Any, _: int) -> StubFuture:
        future: StubFuture = self._client.store(key, 7, blocks, _EVENT)
        return future

    def submit_retrieve(
        self, request: str, key: Any, caches: Any, blocks: Any, event: Any, _: int, skip_first_n_tokens: int = 0
    ) -> StubFuture:
        future: StubFuture = self._client.retrieve(key, 7, blocks, _EVENT, skip_first_n_tokens)
        return future


class StockSide:
    """LMCache's own connector, with `ranks` real worker adapters; 0 leaves the workers out."""

    name = "stock"

    def __init__(self, shape: Shape, blocks: int, step_tokens: int, server: StubServer, ranks: int = 1) -> None:
        self.server = server
        groups = kv_cache_config(shape, blocks)
        self._workers: list[Any] = []
        with _stubbed(server):
            config = vllm_config(shape, step_tokens, dict(_EXTRA), ranks=max(ranks, 1))
            self.connector = LMCacheMPConnector(config, KVConnectorRole.SCHEDULER, groups)
            for rank in range(ranks):
                config = vllm_config(shape, step_tokens, dict(_EXTRA), rank, ranks)
                worker = LMCacheMPConnector(config, KVConnectorRole.WORKER, groups).worker_adapter
                worker.transfer_ctx = _StockTransfer(worker.req_client)
                self._workers.append(worker)
        self._loading: dict[str, list[StubFuture]] = {}
        self._received: set[str] = set()

    def start(self, pool: Any) -> None:
        self.connector.bind_gpu_block_pool(pool)

    def execute(self, metadata: Any) -> None:
        for worker in self._workers:
            for each in metadata.requests:
                submit = worker.submit_store_request if each.direction == "STORE" else worker.submit_retrieve_request
                submit(each.request_id, each.op, None, cache_salt=each.cache_salt)
                if each.direction == "RETRIEVE":
                    future, _ = worker.retrieve_futures[each.request_id]
                    self._loading.setdefault(each.request_id, []).append(future)

    def report(self) -> KVConnectorOutput:
        done = {request for request, futures in self._loading.items() if all(future.query() for future in futures)}
        self._received |= done
        for request in done:
            del self._loading[request]
        return KVConnectorOutput()

    def take_received(self) -> set[str]:
        received, self._received = self._received, set()
        return received

    def busy(self) -> bool:
        return bool(self._loading)


def sides(shape: Shape, blocks: int, step_tokens: int, delay: int, ranks: Sequence[int] = (1, 0)) -> list[Any]:
    """Ours and the stock connector, with the same kind of server behind each; `ranks` of ours and of stock's."""
    return [
        OurSide(shape, blocks, step_tokens, StubServer(256, delay=delay), ranks[0]),
        StockSide(shape, blocks, step_tokens, StubServer(shape.stock_chunk, delay=delay), ranks[1]),
    ]
