"""The worker half: takes plans, copies between pages and slots, seals and checks, and reports every job exactly once.

Stores: clear the seals, copy, wait for the copy, seal, report. Only after every rank's report does the scheduler commit,
so an object that anybody can find either carries its seal or is not believed.
Loads: check the seals again, copy, compare the checksum of what arrived with the one in the seal, report.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from lmcache_mp_safe.contract import (
    SKIP,
    Integrity,
    JobOutcome,
    JobReport,
    LoadJob,
    ObjectCopy,
    PoolSegment,
    StepPlan,
    StepReport,
    StoreJob,
)
from lmcache_mp_safe.errors import LocalError, SafeError, ServerError
from lmcache_mp_safe.geometry.pages import PageLayout
from lmcache_mp_safe.geometry.payload import SEAL_BYTES, Slice, piece_bytes
from lmcache_mp_safe.geometry.seal import CLEARED, Seal, check_seal
from lmcache_mp_safe.geometry.spans import Span, spans
from lmcache_mp_safe.ids import NULL_BLOCK, JobId, RequestId, ServerEpoch
from lmcache_mp_safe.ops.contract import Backend, Bytes, Completion, Fence
from lmcache_mp_safe.worker.pool import MappedPool

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Finished:
    """Loads that ended since the last poll. A failed one is in both sets, as vLLM wants it."""

    received: frozenset[RequestId]
    failed: frozenset[RequestId]


@dataclass
class _Copy:
    """One object's copy under way: its slices by piece, and the seals found in them when it is a load."""

    object: ObjectCopy
    slices: list[Bytes | None]
    completion: Completion
    seals: list[Seal] = field(default_factory=list)


@dataclass
class _Running:
    """One job under way."""

    job: StoreJob | LoadJob
    pool: MappedPool
    copies: list[_Copy]

    @property
    def done(self) -> bool:
        return all(copy.completion.done() for copy in self.copies)


class WorkerHalf:
    """Copies for one rank.

    Args:
        rank: global rank; decides which slice of an object is this process's.
        pages: this rank's page layout; its digest is part of every seal.
    """

    def __init__(
        self,
        *,
        rank: int,
        pages: PageLayout,
        backend: Backend,
        integrity: Integrity = Integrity.CHECKSUM,
        open_pool: Callable[[PoolSegment], MappedPool] = MappedPool,
    ) -> None:
        self._rank = rank
        self._pages = pages
        self._layout_digest = pages.digest
        self._backend = backend
        self._integrity = integrity
        self._open_pool = open_pool
        self._nonce = secrets.token_bytes(16)
        self._pool: MappedPool | None = None
        self._old_pools: list[MappedPool] = []
        self._refused_epoch: ServerEpoch | None = None
        self._running: dict[JobId, _Running] = {}
        self._reports: list[JobReport] = []
        self._unusable: list[tuple[int, ServerEpoch, str]] = []
        self._received: set[RequestId] = set()
        self._failed: set[RequestId] = set()

    # --- the step ---------------------------------------------------------------------------------------------------

    def begin_step(self, plan: StepPlan) -> None:
        """Start the plan's copies behind everything that earlier steps have queued. Never raises."""
        fence = self._backend.record_fence()
        self._use(plan.segment)
        for job_id in plan.wait_for:
            running = self._running.get(job_id)
            for copy in running.copies if running is not None else ():
                self._backend.hold_compute(copy.completion)
        for store in plan.stores:
            self._start(store, fence)
        for load in plan.loads:
            self._start(load, fence)
        self._advance()

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

    @property
    def idle(self) -> bool:
        return not self._running and not self._reports and not self._received

    def shutdown(self) -> None:
        """Unmap everything. Copies still under way are left to the end of the process."""
        self._running.clear()
        for pool in [*self._old_pools, *([self._pool] if self._pool else [])]:
            pool.close()
        self._pool, self._old_pools = None, []

    # --- the pool ---------------------------------------------------------------------------------------------------

    def _use(self, segment: PoolSegment | None) -> None:
        """Map the plan's pool if it is a new one; the old one goes when its last copy is done."""
        if segment is None or segment.epoch == self._refused_epoch:
            return
        if self._pool is not None:
            if self._pool.segment.epoch == segment.epoch:
                return
            self._old_pools.append(self._pool)
            self._pool = None
        try:
            self._pool = self._open_pool(segment)
        except (SafeError, OSError, ValueError) as error:
            self._refused_epoch = segment.epoch
            self._unusable.append((self._rank, segment.epoch, str(error)))

    def _drop_old_pools(self) -> None:
        for pool in [p for p in self._old_pools if all(run.pool is not p for run in self._running.values())]:
            self._old_pools.remove(pool)
            pool.close()

    # --- jobs -------------------------------------------------------------------------------------------------------

    def _start(self, job: StoreJob | LoadJob, fence: Fence) -> None:
        pool = self._pool
        if pool is None or job.epoch != pool.segment.epoch:
            self._end(job, JobOutcome.STALE_EPOCH, "the job's pool is not the one in use")
            return
        try:
            if isinstance(job, StoreJob):
                copies = [self._copy_out(job.object, pool, fence)]
            else:
                copies = self._copy_all_in(job, pool, fence)
        except _BadSealError as error:
            self._end(job, JobOutcome.BAD_SEAL, str(error), error.objects)
        except Exception as error:  # whatever it is, it is this job's end and not the engine's
            logger.warning("job %d could not be copied: %s", job.job_id, error)
            self._end(job, JobOutcome.COPY_FAILED, str(error))
        else:
            self._running[job.job_id] = _Running(job, pool, copies)

    def _slice(self, pool: MappedPool) -> Slice:
        return Slice(*pool.segment.slices[self._rank])

    def _copy_out(self, copy: ObjectCopy, pool: MappedPool, fence: Fence) -> _Copy:
        part = self._slice(pool)
        slices: list[Bytes | None] = []
        for slot in copy.slots:
            if slot == SKIP:
                slices.append(None)
                continue
            slices.append(self._own_slice(pool, part, slot))
            pool.claim(slot + part.offset, part.size)
        payload = self._spans(copy, part, len(slices), may_skip=False)
        for view in slices:
            if view is not None:
                view[part.capacity :] = _as_bytes(CLEARED)
        completion = self._backend.copy_out(payload, slices, fence)
        return _Copy(copy, slices, completion)

    def _copy_all_in(self, job: LoadJob, pool: MappedPool, fence: Fence) -> list[_Copy]:
        """Check every seal before anything is written, then copy."""
        part = self._slice(pool)
        ready: list[tuple[ObjectCopy, list[Bytes], list[Span], list[Seal]]] = []
        bad: list[int] = []
        why = ""
        for index, copy in enumerate(job.objects):
            slices = [self._own_slice(pool, part, slot) for slot in copy.slots]
            payload = self._spans(copy, part, len(slices), may_skip=True)
            try:
                ready.append((copy, slices, payload, self._seals(copy, slices, part)))
            except ServerError as error:
                bad.append(index)
                why = str(error)
        if bad:
            raise _BadSealError(why, tuple(bad))
        return [
            _Copy(copy, list(slices), self._backend.copy_in(payload, slices, fence), seals)
            for copy, slices, payload, seals in ready
        ]

    def _own_slice(self, pool: MappedPool, part: Slice, slot: int) -> Bytes:
        """This rank's slice of the object at `slot`; all of the object must lie inside of the pool."""
        last_offset, last_size = pool.segment.slices[-1]
        pool.view(slot, last_offset + last_size)
        return pool.view(slot + part.offset, part.size)

    def _spans(self, copy: ObjectCopy, part: Slice, pieces: int, *, may_skip: bool) -> list[Span]:
        """The payload as byte runs.

        Raises:
            LocalError: it names the null block, a block that does not exist, or needs more pieces than there are slots.
        """
        for block in {block for ids in copy.blocks for block in ids}:
            if not (may_skip and block == SKIP) and not NULL_BLOCK < block < self._pages.num_blocks:
                raise LocalError(f"block {block} is no block to copy: there are {self._pages.num_blocks}, 0 is null")
        payload = spans(copy.blocks, self._pages, part.capacity)
        if payload and payload[-1].piece >= pieces:
            raise LocalError(f"the payload needs {payload[-1].piece + 1} pieces, the job has {pieces} slots")
        return payload

    def _payload_bytes(self, copy: ObjectCopy) -> int:
        pages = self._pages.group_page_bytes
        return sum(len(ids) * page for ids, page in zip(copy.blocks, pages, strict=True))

    def _seals(self, copy: ObjectCopy, slices: list[Bytes], part: Slice) -> list[Seal]:
        if self._integrity is Integrity.OFF:
            return []
        payload_bytes = self._payload_bytes(copy)
        return [
            check_seal(
                view[part.capacity :].tobytes(),
                layout_digest=self._layout_digest,
                object_digest=copy.digest,
                rank=self._rank,
                piece=piece,
                pieces=len(slices),
                payload_bytes=piece_bytes(payload_bytes, part.capacity, piece),
            )
            for piece, view in enumerate(slices)
        ]

    # --- ends -------------------------------------------------------------------------------------------------------

    def _advance(self) -> None:
        for running in [run for run in self._running.values() if run.done]:
            del self._running[running.job.job_id]
            if isinstance(running.job, StoreJob):
                self._seal(running.copies[0], running.pool)
                self._end(running.job, JobOutcome.DONE)
            else:
                self._check_arrival(running)
        if self._old_pools:
            self._drop_old_pools()

    def _seal(self, copy: _Copy, pool: MappedPool) -> None:
        """The payload is in the slot: vouch for it."""
        part = self._slice(pool)
        payload_bytes = self._payload_bytes(copy.object)
        for piece, (view, checksum) in enumerate(zip(copy.slices, copy.completion.checksums, strict=True)):
            if view is None:
                continue
            seal = Seal(
                layout_digest=self._layout_digest,
                object_digest=copy.object.digest,
                rank=self._rank,
                piece=piece,
                pieces=len(copy.slices),
                payload_bytes=piece_bytes(payload_bytes, part.capacity, piece),
                checksum=checksum,
                nonce=self._nonce,
            )
            view[part.capacity :] = _as_bytes(seal.encode())

    def _check_arrival(self, running: _Running) -> None:
        if self._integrity is Integrity.CHECKSUM:
            bad = tuple(
                index
                for index, copy in enumerate(running.copies)
                if [seal.checksum for seal in copy.seals] != list(copy.completion.checksums)
            )
            if bad:
                why = f"{len(bad)} of {len(running.copies)} objects did not arrive as they were sealed"
                self._end(running.job, JobOutcome.BAD_CHECKSUM, why, bad)
                return
        self._end(running.job, JobOutcome.DONE)

    def _end(
        self, job: StoreJob | LoadJob, outcome: JobOutcome, detail: str = "", bad_objects: tuple[int, ...] = ()
    ) -> None:
        self._reports.append(JobReport(job.job_id, self._rank, outcome, detail, bad_objects))
        if isinstance(job, LoadJob):
            self._received.add(job.request_id)
            if outcome is not JobOutcome.DONE:
                self._failed.add(job.request_id)


class _BadSealError(Exception):
    def __init__(self, why: str, objects: tuple[int, ...]) -> None:
        super().__init__(why)
        self.objects = objects


def _as_bytes(data: bytes) -> Bytes:
    import numpy as np

    assert len(data) == SEAL_BYTES
    return np.frombuffer(data, dtype=np.uint8)
