"""An engine in small: vLLM's loop around its real Scheduler, one worker a rank, and the runner in place of a model.

The loop is `EngineCore.step`, or with overlap `step_with_batch_queue`: up to two steps are planned before the output of
the first is processed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from lmcache_mp_safe.connector import LayoutMetadata, ReportMetadata
from lmcache_mp_safe.contract import StepReport
from lmcache_mp_safe.testing.sim import host
from lmcache_mp_safe.testing.sim.device import Rank
from lmcache_mp_safe.testing.sim.network import NetworkMaker
from lmcache_mp_safe.testing.sim.runner import Runner
from lmcache_mp_safe.testing.sim.settings import Settings
from lmcache_mp_safe.testing.sim_device import SimEvent

_DEPTH = 2


class Engine:
    """One vLLM.

    Attributes:
        planned: called with each step's plan, before the workers get it.
        reported: called with each rank's report, before the scheduler gets it.
    """

    def __init__(self, settings: Settings, clock: Callable[[], float], maker: Callable[[], NetworkMaker]) -> None:
        self.settings = settings
        self._clock = clock
        config, groups = host.vllm_config(settings), host.kv_cache_config(settings)
        self.scheduler = host.make_scheduler(config, groups, settings, clock, maker)
        self.runner = Runner(host.groups_of(settings), settings.drafts, Random(f"drafts {settings.seed}"))
        self.ranks = [Rank(number, settings) for number in range(settings.ranks)]
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.connector = self.scheduler.connector
        self.workers: list[host.SimConnector] = []
        if settings.newest_first:
            queue = self.pool.free_block_queue
            queue.append_n = lambda blocks: queue.prepend_n(list(reversed(blocks)))
        if settings.connector:
            self._connect(config, groups, clock, maker)
        self._aggregator = KVOutputAggregator(settings.ranks)
        self._under_way: deque[tuple[SchedulerOutput, list[ModelRunnerOutput], list[SimEvent | None]]] = deque()
        self.planned: Callable[[SchedulerOutput], None] = lambda output: None
        self.reported: Callable[[int, StepReport], None] = lambda rank, report: None
        self.salts: dict[str, str] = {}
        self.aborts: list[str] = []

    def _connect(
        self,
        config: VllmConfig,
        groups: KVCacheConfig,
        clock: Callable[[], float],
        maker: Callable[[], NetworkMaker],
    ) -> None:
        assert isinstance(self.connector, host.SimConnector)
        self.connector.bind_gpu_block_pool(self.pool)
        layouts = {rank.number: LayoutMetadata(rank.layout) for rank in self.ranks}
        self.connector.set_xfer_handshake_metadata(layouts)
        self.workers = [
            host.SimConnector(config, KVConnectorRole.WORKER, groups, clock=clock, maker=maker, worker=rank.worker)
            for rank in self.ranks
        ]

    # --- requests ---------------------------------------------------------------------------------------------------

    def arrive(self, name: str, tokens: list[int], max_tokens: int, salt: str) -> bool:
        """Add a request; False if vLLM still has one of that name, or a step of it under way.

        vLLM itself cannot tell the two apart then, and makes its own ids unique by a random part.
        """
        under_way = any(name in output.num_scheduled_tokens for output, _, _ in self._under_way)
        if under_way or name in self.scheduler.requests or name in self.scheduler.finished_req_ids:
            return False
        request = Request(
            name,
            tokens,
            SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            None,
            arrival_time=self._clock(),
            cache_salt=salt or None,
            block_hasher=host.block_hasher(),
        )
        self.salts[name] = salt
        self.scheduler.add_request(request)
        return True

    def abort(self, name: str) -> None:
        """As a client that disconnects; done before the next output is processed."""
        self.aborts.append(name)

    @property
    def busy(self) -> bool:
        """Whether vLLM would go on stepping."""
        return bool(self._under_way) or self.scheduler.has_requests()

    # --- steps ------------------------------------------------------------------------------------------------------

    def step(self, random: Random) -> SchedulerOutput | None:
        """One turn of the loop; the step that was planned in it, if any."""
        planned: SchedulerOutput | None = None
        if self.scheduler.has_requests():
            planned = self.scheduler.schedule()
            self._execute(planned, random)
            wait = len(self._under_way) == _DEPTH or not self.settings.overlap
            if not wait and (planned.total_num_scheduled_tokens or self.scheduler.has_requests()):
                return planned
        if self._under_way:
            self._process(random)
        return planned

    def _execute(self, output: SchedulerOutput, random: Random) -> None:
        self.planned(output)
        work, sampled = self.runner.step(output, self.salts)
        outputs: list[ModelRunnerOutput] = []
        events: list[SimEvent | None] = []
        names = list(sampled)
        for index, rank in enumerate(self.ranks):
            rank.migrate(work)
            worker = self.workers[index] if self.workers else None
            if worker is not None:
                worker.bind_connector_metadata(output.kv_connector_metadata)
            events.append(rank.forward(work) if work else None)
            rank.settle(work)
            if random.random() < 0.5:
                rank.run_some(random, 4)
            made = ModelRunnerOutput(
                names, {name: place for place, name in enumerate(names)}, [sampled[name] for name in names]
            )
            if worker is not None:
                made.kv_connector_output = _connector_output(worker, output)
                meta = made.kv_connector_output.kv_connector_worker_meta
                if isinstance(meta, ReportMetadata):
                    self.reported(rank.number, meta.report)
            outputs.append(made)
        self._under_way.append((output, outputs, events))

    def _process(self, random: Random) -> None:
        output, outputs, events = self._under_way.popleft()
        for rank, event in zip(self.ranks, events, strict=True):
            if event is not None:
                rank.run_until(event, random)
        made = self._aggregator.aggregate(outputs) if self.workers else outputs[0]
        assert made is not None
        self.take_aborts()
        self.scheduler.update_from_output(output, made)
        if self.settings.drafts and not self.settings.overlap and output.total_num_scheduled_tokens:
            drafts = self.runner.take_drafts(output.num_scheduled_tokens)
            self.scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), list(drafts.values())))

    def take_aborts(self) -> None:
        for name in self.aborts:
            self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self.aborts.clear()


def _connector_output(worker: host.SimConnector, output: SchedulerOutput) -> KVConnectorOutput:
    """What vLLM's runner mixin asks a worker's connector after a step."""
    results = worker.get_transfer_results(output.finished_req_ids)
    found = KVConnectorOutput(
        finished_sending=results.finished_sending or None,
        finished_recving=results.finished_recving or None,
        failed_recving=results.failed_recving,
        kv_connector_worker_meta=worker.build_connector_worker_meta(),
    )
    worker.clear_connector_metadata()
    return found
