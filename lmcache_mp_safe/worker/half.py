"""The worker half: takes plans, copies between pages and slots, seals, checks, and reports every job exactly once.

Stores: clear the seals, copy, wait for the copy, seal, report. Only after every rank's report does the scheduler
commit, so an object that anybody can find either carries its seal or is not believed.
Loads: check the seals again, copy, compare the checksum of what arrived with the one in the seal, report.

Whatever goes wrong is the end of a job and never of the engine. A job is reported only once nothing of it is under way:
its report gives blocks and slots back.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

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
from lmcache_mp_safe.ids import NULL_BLOCK, RequestId, ServerEpoch
from lmcache_mp_safe.ops.contract import Backend, Bytes, Fence
from lmcache_mp_safe.worker.jobs import Copy, Running
from lmcache_mp_safe.worker.pool import MappedPool

logger = logging.getLogger("vllm.lmcache_mp_safe.worker")


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
        self._running: list[Running] = []
        self._reports: list[JobReport] = []
        self._unusable: list[tuple[int, ServerEpoch, str]] = []
        self._received: set[RequestId] = set()
        self._failed: set[RequestId] = set()

    # --- the step ---------------------------------------------------------------------------------------------------

    def begin_step(self, plan: StepPlan) -> None:
        """Start the plan's copies behind everything that earlier steps have queued. Never raises."""
        fence = self._record_fence()
        self._use(plan.segment)
        for store in plan.stores:
            self._start(store, fence)
        for load in plan.loads:
            self._start(load, fence)
        for running in self._running:
            if running.job.job_id in plan.wait_for:
                self._hold_compute(running)
        self._advance()

    def _record_fence(self) -> Fence | None:
        """None: no order can be made in this step, so nothing may be copied."""
        try:
            return self._backend.record_fence()
        except Exception:
            logger.exception("no fence could be recorded; this step's stores and loads fail")
            return None

    def _hold_compute(self, running: Running) -> None:
        try:
            for copy in running.copies:
                self._backend.hold_compute(copy.completion)
        except Exception as error:  # the forward may write into what is being copied: it must not be sealed
            self._fail(running, error)

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
        """Nothing is under way and nothing is left to be told."""
        return not (self._running or self._reports or self._unusable or self._received)

    def shutdown(self) -> None:
        """Wait for the copies under way, then unmap everything. They are not reported any more."""
        try:
            self._backend.drain()
        except Exception:
            logger.exception("copies may still be under way: the server's pool stays mapped until the process ends")
            return
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
        except Exception as error:  # told to the scheduler, which says what it means
            self._refused_epoch = segment.epoch
            self._unusable.append((self._rank, segment.epoch, str(error)))

    def _drop_old_pools(self) -> None:
        for pool in [p for p in self._old_pools if all(run.pool is not p for run in self._running)]:
            self._old_pools.remove(pool)
            pool.close()

    # --- jobs -------------------------------------------------------------------------------------------------------

    def _start(self, job: StoreJob | LoadJob, fence: Fence | None) -> None:
        pool = self._pool
        if pool is None or job.epoch != pool.segment.epoch:
            self._end(job, JobOutcome.STALE_EPOCH, "the job's pool is not the one in use")
            return
        running = Running(job, pool)
        self._running.append(running)
        try:
            self._submit(running, fence)
        except _BadSealError as error:
            self._running.remove(running)
            self._end(job, JobOutcome.BAD_SEAL, str(error), error.objects)
        except Exception as error:  # it ends with the copies that were queued before
            self._fail(running, error)

    def _submit(self, running: Running, fence: Fence | None) -> None:
        """Queue the job's copies; each is in `running` as soon as it is queued."""
        if fence is None:
            raise LocalError("no fence could be recorded on the compute stream")
        if isinstance(running.job, StoreJob):
            self._copy_out(running, running.job.object, fence)
        else:
            self._copy_all_in(running, running.job, fence)

    def _fail(self, running: Running, error: Exception) -> None:
        if running.failure is None:
            running.failure = str(error) or type(error).__name__
            unforeseen = None if isinstance(error, SafeError) else error
            logger.warning("job %d could not be copied: %s", running.job.job_id, running.failure, exc_info=unforeseen)

    def _slice(self, pool: MappedPool) -> Slice:
        return Slice(*pool.segment.slices[self._rank])

    def _copy_out(self, running: Running, copy: ObjectCopy, fence: Fence) -> None:
        part = self._slice(running.pool)
        slices = [None if slot == SKIP else self._own_slice(running.pool, part, slot) for slot in copy.slots]
        self._require_blocks([copy], may_skip=False)
        payload = self._spans(copy, part)
        for view in slices:
            if view is not None:
                view[part.capacity :] = _as_bytes(CLEARED)
        running.copies.append(Copy(copy, slices, self._backend.copy_out(payload, slices, fence)))

    def _copy_all_in(self, running: Running, job: LoadJob, fence: Fence) -> None:
        """Check every seal before anything is written, then copy."""
        part = self._slice(running.pool)
        self._require_blocks(job.objects, may_skip=True)
        ready: list[tuple[ObjectCopy, list[Bytes], list[Span], list[Seal]]] = []
        bad: list[int] = []
        why = ""
        for index, copy in enumerate(job.objects):
            slices = [self._own_slice(running.pool, part, slot) for slot in copy.slots]
            payload = self._spans(copy, part)
            try:
                ready.append((copy, slices, payload, self._seals(copy, slices, part)))
            except ServerError as error:
                bad.append(index)
                why = str(error)
        if bad:
            raise _BadSealError(why, tuple(bad))
        for copy, slices, payload, seals in ready:
            running.copies.append(Copy(copy, [*slices], self._backend.copy_in(payload, slices, fence), seals))

    def _own_slice(self, pool: MappedPool, part: Slice, slot: int) -> Bytes:
        """This rank's slice of the object at `slot`, with memory behind it.

        Raises:
            ServerError: not all of the object lies inside of the pool, or /dev/shm is full.
        """
        last_offset, last_size = pool.segment.slices[-1]
        pool.view(slot, last_offset + last_size)
        pool.claim(slot + part.offset, part.size)
        return pool.view(slot + part.offset, part.size)

    def _require_blocks(self, copies: Sequence[ObjectCopy], *, may_skip: bool) -> None:
        """Every block may be copied, and belongs to one page of the job: vLLM gives a block to one group at a time.

        Raises:
            LocalError: the null block, one that does not exist, or one that is named twice; of two copies into one
                page the second would replace the first after its checksum was taken.
        """
        seen: set[int] = set()
        for block in (block for copy in copies for ids in copy.blocks for block in ids):
            if may_skip and block == SKIP:
                continue
            if not NULL_BLOCK < block < self._pages.num_blocks:
                raise LocalError(f"block {block} is no block to copy: there are {self._pages.num_blocks}, 0 is null")
            if block in seen:
                raise LocalError(f"block {block} is named twice in one job")
            seen.add(block)

    def _spans(self, copy: ObjectCopy, part: Slice) -> list[Span]:
        """The payload as byte runs.

        Raises:
            LocalError: it needs more pieces than there are slots.
        """
        payload = spans(copy.blocks, self._pages, part.capacity)
        if payload and payload[-1].piece >= len(copy.slots):
            raise LocalError(f"the payload needs {payload[-1].piece + 1} pieces, the job has {len(copy.slots)} slots")
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
        """End the jobs that have nothing under way any more. Never raises."""
        for running in [run for run in self._running if self._is_over(run)]:
            self._running.remove(running)
            self._settle(running)
        self._drop_old_pools()

    def _is_over(self, running: Running) -> bool:
        try:
            return running.over
        except Exception as error:  # the device is lost, and with it its copies
            self._fail(running, error)
            return True

    def _settle(self, running: Running) -> None:
        """Seal a store or check a load, and report it."""
        bad: tuple[int, ...] = ()
        try:
            if running.failure is None and isinstance(running.job, StoreJob):
                self._seal(running.copies[0], running.pool)
            elif running.failure is None:
                bad = self._wrong_arrivals(running)
        except Exception as error:
            self._fail(running, error)
        if running.failure is not None:
            self._end(running.job, JobOutcome.COPY_FAILED, running.failure)
        elif bad:
            why = f"{len(bad)} of {len(running.copies)} objects did not arrive as they were sealed"
            self._end(running.job, JobOutcome.BAD_CHECKSUM, why, bad)
        else:
            self._end(running.job, JobOutcome.DONE)

    def _seal(self, copy: Copy, pool: MappedPool) -> None:
        """The payload is in the slots: vouch for it. No seal is written unless all can be."""
        part = self._slice(pool)
        payload_bytes = self._payload_bytes(copy.object)
        seals = [
            Seal(
                layout_digest=self._layout_digest,
                object_digest=copy.object.digest,
                rank=self._rank,
                piece=piece,
                pieces=len(copy.slices),
                payload_bytes=piece_bytes(payload_bytes, part.capacity, piece),
                checksum=checksum,
                nonce=self._nonce,
            ).encode()
            for piece, (_, checksum) in enumerate(zip(copy.slices, copy.completion.checksums, strict=True))
        ]
        for view, seal in zip(copy.slices, seals, strict=True):
            if view is not None:
                view[part.capacity :] = _as_bytes(seal)

    def _wrong_arrivals(self, running: Running) -> tuple[int, ...]:
        """Indices of the load's objects that are not what was sealed.

        Raises:
            Exception: a copy failed.
        """
        arrived = [list(copy.completion.checksums) for copy in running.copies]
        if self._integrity is not Integrity.CHECKSUM:
            return ()
        sealed = [[seal.checksum for seal in copy.seals] for copy in running.copies]
        return tuple(index for index, pair in enumerate(zip(arrived, sealed, strict=True)) if pair[0] != pair[1])

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
    assert len(data) == SEAL_BYTES
    return np.frombuffer(data, dtype=np.uint8)
