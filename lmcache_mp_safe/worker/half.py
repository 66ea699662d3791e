"""The worker half: takes plans, has their jobs copied, and reports every job exactly once.

What it does in the engine's thread is little: record a fence, queue the plan's jobs for the copy thread, hand out the
reports that came back. The copies themselves are `copier.py`'s.

Whatever goes wrong is the end of a job and never of the engine. A job is reported only once nothing of it is under way:
its report gives blocks and slots back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lmcache_mp_safe.contract import (
    Integrity,
    JobOutcome,
    JobReport,
    LoadJob,
    PoolSegment,
    StepPlan,
    StepReport,
    StoreJob,
)
from lmcache_mp_safe.errors import LocalError
from lmcache_mp_safe.geometry.pages import PageLayout
from lmcache_mp_safe.ids import JobId, RequestId, ServerEpoch
from lmcache_mp_safe.metrics.counts import CopiedBytes, CopyEnd, CopyTime
from lmcache_mp_safe.metrics.tally import Sample, Tally
from lmcache_mp_safe.ops.contract import Backend, Fence
from lmcache_mp_safe.worker.copier import Copier, fail
from lmcache_mp_safe.worker.copy_thread import CopyQueue, Inline
from lmcache_mp_safe.worker.jobs import Batch, Running
from lmcache_mp_safe.worker.pool import MappedPool

logger = logging.getLogger("vllm.lmcache_mp_safe.worker")

_ENDS = {outcome: CopyEnd[outcome.name] for outcome in JobOutcome}

JOBS_AT_ONCE = 8  # what a load, or the seal of an earlier store, may have to wait for
_ENDS_AT_ONCE = 16  # taken over by one call, three times a step: each takes 3 us of the engine's time


@dataclass(frozen=True)
class Finished:
    """Loads that ended since the last poll. A failed one is in both sets, as vLLM wants it."""

    received: frozenset[RequestId]
    failed: frozenset[RequestId]


class WorkerHalf:
    """Copies for one rank.

    Args:
        rank: global rank; decides which slice of an object is this process's.
        pages: this rank's page layout; its digest is part of every seal.
        queue: where copies are submitted and settled, one after the other. It is this half's alone.
        clock: monotonic seconds, for the metrics.
    """

    def __init__(
        self,
        *,
        rank: int,
        pages: PageLayout,
        backend: Backend,
        integrity: Integrity = Integrity.CHECKSUM,
        queue: CopyQueue | None = None,
        open_pool: Callable[[PoolSegment, Backend], MappedPool] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rank = rank
        self._pages = pages
        self._backend = backend
        self._copier = Copier(rank, pages, backend, integrity)
        self._queue = queue if queue is not None else Inline()
        self._queue.watch(self._copier.settle)
        self._open_pool = open_pool if open_pool is not None else _open_pool
        self._pool: MappedPool | None = None
        self._old_pools: list[MappedPool] = []
        self._refused_epoch: ServerEpoch | None = None
        self._clock = clock
        self._tally = Tally()
        self._batches: list[Batch] = []
        self._reports: list[JobReport] = []
        self._unusable: list[tuple[int, ServerEpoch, str]] = []
        self._received: set[RequestId] = set()
        self._failed: set[RequestId] = set()

    # --- the step ---------------------------------------------------------------------------------------------------

    def begin_step(self, plan: StepPlan) -> None:
        """Start the plan's copies behind everything that earlier steps have queued. Never raises."""
        self._use(plan.segment)
        self._advance()
        fence = self._record_fence() if plan.stores or plan.loads else None
        self._start(plan.loads, fence, urgent=True)  # a request waits for a load, nobody for a store
        self._start(plan.stores, fence, urgent=False)
        if plan.wait_for:
            for running in self._running(plan.wait_for):
                self._hold_compute(running)

    def _record_fence(self) -> Fence | None:
        """None: no order can be made in this step, so nothing may be copied."""
        try:
            return self._backend.record_fence()
        except Exception:
            logger.exception("no fence could be recorded; this step's stores and loads fail")
            return None

    def _running(self, job_ids: Sequence[JobId]) -> list[Running]:
        """Those of these jobs whose batch is not over yet."""
        return [running for batch in self._batches for running in batch.running() if running.job.job_id in job_ids]

    def _hold_compute(self, running: Running) -> None:
        """Before the forward writes into a job's block, its copy must be over, or never begin."""
        with running.lock:  # free within one submission
            if not running.submitted:
                fail(running, LocalError("its block is written again before the copy began"))
            copy = running.copy  # the copy thread lets it go once it is over
            try:
                if copy is not None:
                    self._backend.hold_compute(copy.completion)
            except Exception as error:  # the forward may write into what is being copied: it must not be sealed
                fail(running, error)

    def poll(self) -> Finished:
        """Loads that ended; each is told exactly once."""
        self._advance()
        finished = Finished(frozenset(self._received), frozenset(self._failed))
        self._received, self._failed = set(), set()
        return finished

    def take_report(self) -> StepReport | None:
        """What is to be told to the scheduler, if anything."""
        self._advance()
        if not self._reports and not self._unusable:
            return None
        report = StepReport(tuple(self._reports), tuple(self._unusable))
        self._reports, self._unusable = [], []
        return report

    def take_sample(self) -> Sample | None:
        """What is new for the metrics since the last call; None if nothing is."""
        return self._tally.take({})

    @property
    def jobs_left(self) -> int:
        """Jobs that were taken and have not been reported."""
        return sum(batch.left for batch in self._batches)

    @property
    def idle(self) -> bool:
        """Nothing is under way and nothing is left to be told."""
        return not (self._batches or self._reports or self._unusable or self._received)

    def shutdown(self) -> None:
        """Wait for the copies under way, then unmap everything. They are not reported any more."""
        try:
            self._queue.shutdown()
            self._backend.drain()
        except Exception:
            logger.exception("copies may still be under way: the server's pool stays mapped until the process ends")
            return
        self._batches.clear()
        for pool in [*self._old_pools, *([self._pool] if self._pool else [])]:
            pool.close()
        self._pool, self._old_pools = None, []

    # --- the pool ---------------------------------------------------------------------------------------------------

    def _use(self, segment: PoolSegment | None) -> None:
        """Map the plan's pool if it is a new one. The old one goes when its last copy is done; also when there is no
        new one, for a server that comes back may need the room that a dead one's pool takes while it is mapped."""
        epoch = None if segment is None else segment.epoch
        if self._pool is not None and self._pool.segment.epoch != epoch:
            self._old_pools.append(self._pool)
            self._pool = None
        if segment is None or self._pool is not None or epoch == self._refused_epoch:
            return
        try:
            self._pool = self._open_pool(segment, self._backend)
        except Exception as error:  # told to the scheduler, which says what it means
            self._refused_epoch = segment.epoch
            self._unusable.append((self._rank, segment.epoch, str(error)))

    def _drop_old_pools(self) -> None:
        for pool in [p for p in self._old_pools if all(batch.pool is not p for batch in self._batches)]:
            self._old_pools.remove(pool)
            self._queue.submit(pool.close)  # giving page-locked memory back takes a while

    # --- jobs -------------------------------------------------------------------------------------------------------

    def _start(self, jobs: Sequence[StoreJob | LoadJob], fence: Fence | None, *, urgent: bool) -> None:
        pool = self._pool
        epoch = None if pool is None else pool.segment.epoch
        usable = [job for job in jobs if job.epoch == epoch]
        if len(usable) < len(jobs):
            self._refuse([job for job in jobs if job.epoch != epoch])
        if usable and pool is not None:
            batch = Batch(usable, pool, self._clock())
            self._batches.append(batch)
            self._queue.submit(self._submit, batch, 0, fence, urgent, urgent=urgent)

    def _refuse(self, jobs: Sequence[StoreJob | LoadJob]) -> None:
        why = "the job's pool is not the one in use"
        for job in jobs:
            self._end(job, JobReport(job.job_id, self._rank, JobOutcome.STALE_EPOCH, why))

    def _submit(self, batch: Batch, first: int, fence: Fence | None, urgent: bool) -> None:
        """On the copy thread: a few at once, so that something urgent need not wait for all."""
        end = first + JOBS_AT_ONCE
        self._copier.submit(batch.running()[first:end], fence)
        if end < len(batch.jobs):
            self._queue.submit(self._submit, batch, end, fence, urgent, urgent=urgent)

    def _advance(self) -> None:
        """Take over what has ended, or some of it. Never raises."""
        self._queue.hook()
        settled, now = self._copier.settled, self._clock()
        for _ in range(min(len(settled), _ENDS_AT_ONCE)):
            running, report, copied_bytes = settled.popleft()
            running.batch.left -= 1
            if not running.batch.left:
                self._batches.remove(running.batch)
            stores = isinstance(running.job, StoreJob)
            self._tally.observe(CopyTime.STORE if stores else CopyTime.LOAD, now - running.batch.started)
            if copied_bytes:
                self._tally.add(CopiedBytes.STORE if stores else CopiedBytes.LOAD, copied_bytes)
            self._end(running.job, report)
        if self._old_pools:
            self._drop_old_pools()

    def _end(self, job: StoreJob | LoadJob, report: JobReport) -> None:
        self._tally.add(_ENDS[report.outcome])
        self._reports.append(report)
        if isinstance(job, LoadJob):
            self._received.add(job.request_id)
            if report.outcome is not JobOutcome.DONE:
                self._failed.add(job.request_id)


def _open_pool(segment: PoolSegment, backend: Backend) -> MappedPool:
    return MappedPool(segment, backend.adopt)
