"""What one job is for one rank: copies between pages and slots, seals, and the check of what arrived.

Stores: clear the seals, copy, wait for the copy, seal. Only after every rank's report does the scheduler commit, so an
object that anybody can find either carries its seal or is not believed.
Loads: check the seals again, copy, compare the checksum of what arrived with the one in the seal.

Runs on the copy thread, one call at a time, and never raises: whatever goes wrong is the end of a job. Ends go back to
the engine's thread through `Copier.settled`.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from lmcache_mp_safe.contract import (
    SKIP,
    Integrity,
    JobOutcome,
    JobReport,
    LoadJob,
    ObjectCopy,
    StoreJob,
)
from lmcache_mp_safe.errors import LocalError, SafeError, ServerError
from lmcache_mp_safe.geometry.pages import PageLayout
from lmcache_mp_safe.geometry.payload import SEAL_BYTES, Slice, piece_bytes
from lmcache_mp_safe.geometry.seal import CLEARED, Seal, check_seal, layout_in
from lmcache_mp_safe.geometry.spans import Spans, spans
from lmcache_mp_safe.ids import NULL_BLOCK
from lmcache_mp_safe.ops.contract import Backend, Bytes, Fence
from lmcache_mp_safe.worker.jobs import Copy, Running, UnderWay
from lmcache_mp_safe.worker.pool import MappedPool

logger = logging.getLogger("vllm.lmcache_mp_safe.worker")


class _Store(NamedTuple):
    """A store, ready to be queued: this rank's slices, their parts for payload, and the payload."""

    slices: list[Bytes | None]
    slots: list[Bytes | None]
    payload: Spans


class Copier:
    """Copies for one rank; see `WorkerHalf` for the arguments.

    Attributes:
        settled: jobs of which nothing is under way any more, with their reports and the bytes of pages that were copied
            well; for the other thread to take out.
    """

    def __init__(self, rank: int, pages: PageLayout, backend: Backend, integrity: Integrity) -> None:
        self._rank = rank
        self._pages = pages
        self._layout_digest = pages.digest
        self._backend = backend
        self._integrity = integrity
        self._nonce = secrets.token_bytes(16)
        self._under_way: list[Running] = []
        self.settled: deque[tuple[Running, JobReport, int]] = deque()

    def submit(self, jobs: Sequence[Running], fence: Fence | None) -> None:
        """Queue the copies of one plan's stores, or loads, that have not been given up meanwhile."""
        if isinstance(jobs[0].job, StoreJob):
            self._submit_stores(jobs, fence)
        else:
            for running in jobs:
                self._submit_load(running, fence)
        self._under_way += jobs

    def settle(self) -> UnderWay:
        """Seal or check, and report, the jobs that have nothing under way any more.

        Returns:
            What is left. Copies of one direction end in order, so behind one that is not over none is asked.
        """
        left: list[Running] = []
        waiting: set[type] = set()
        for running in self._under_way:
            way = type(running.job)
            if way not in waiting and _is_over(running):
                report = self._report(running)
                running.copy = None  # here: giving events and page-locked memory back asks the driver
                self.settled.append((running, report, self._copied_bytes(running.job, report)))
            else:
                waiting.add(way)
                left.append(running)
        self._under_way = left
        if LoadJob in waiting:
            return UnderWay.LOADS
        return UnderWay.STORES if waiting else UnderWay.NOTHING

    # --- submitting -------------------------------------------------------------------------------------------------

    def _submit_stores(self, jobs: Sequence[Running], fence: Fence | None) -> None:
        """Of a job that cannot be stored nothing is copied; the others are."""
        prepared = [(running, self._prepare(running)) for running in jobs if running.failure is None]
        with jobs[0].lock:  # one for all; not while memory is page-locked, for the engine may wait for it
            ready = [(running, store) for running, store in prepared if store is not None and running.failure is None]
            try:
                if ready:
                    self._copy_out(ready, fence)
            except Exception as error:
                for running, _ in ready:
                    fail(running, error)
            for running in jobs:
                running.submitted = True

    def _prepare(self, running: Running) -> _Store | None:
        """None, and the job fails, if it cannot be stored."""
        assert isinstance(running.job, StoreJob)
        copy, part = running.job.object, self._slice(running.pool)
        try:
            slices = [None if slot == SKIP else self._own_slice(running.pool, part, slot) for slot in copy.slots]
            self._require_blocks([copy], may_skip=False)
            payload = self._spans(copy, part)
        except Exception as error:
            fail(running, error)
            return None
        for view in slices:
            if view is not None:
                view[part.capacity :] = _as_bytes(CLEARED)
        return _Store(slices, [None if view is None else view[: part.capacity] for view in slices], payload)

    def _copy_out(self, ready: Sequence[tuple[Running, _Store]], fence: Fence | None) -> None:
        """All as one payload, for each call into a driver costs a wait for the interpreter. They end together."""
        payload = Spans.joined([(store.payload, len(store.slots)) for _, store in ready])
        slots = [slot for _, store in ready for slot in store.slots]
        completion = self._backend.copy_out(payload, slots, _required(fence))
        first = 0
        for running, store in ready:
            running.copy = Copy(store.slices, completion, first, len(slots))
            first += len(store.slots)

    def _submit_load(self, running: Running, fence: Fence | None) -> None:
        assert isinstance(running.job, LoadJob)
        with running.lock:
            if running.failure is None:
                try:
                    self._copy_all_in(running, running.job, _required(fence))
                except Exception as error:
                    fail(running, error)
            running.submitted = True

    def _copy_all_in(self, running: Running, job: LoadJob, fence: Fence) -> None:
        """Check every seal before anything is written, then copy all objects as one payload: each call into a driver
        costs a wait for the interpreter."""
        part = self._slice(running.pool)
        self._require_blocks(job.objects, may_skip=True)
        slices: list[Bytes] = []
        seals: list[Seal] = []
        bad: list[int] = []
        for index, copy in enumerate(job.objects):
            own = [self._own_slice(running.pool, part, slot) for slot in copy.slots]
            slices += own
            try:
                seals += self._seals(copy, own, running.pool)
            except ServerError as error:
                bad.append(index)
                running.failure = str(error)
        running.bad_seals = tuple(bad)
        if bad:
            return
        payload = Spans.joined([(self._spans(copy, part), len(copy.slots)) for copy in job.objects])
        slots = [view[: part.capacity] for view in slices]
        checked = self._integrity is Integrity.CHECKSUM
        completion = self._backend.copy_in(payload, slots, fence, checked=checked)
        running.copy = Copy([*slices], completion, 0, len(slots), seals)

    def _slice(self, pool: MappedPool) -> Slice:
        return Slice(*pool.segment.slices[self._rank])

    def _own_slice(self, pool: MappedPool, part: Slice, slot: int) -> Bytes:
        """This rank's slice of the object at `slot`, with memory behind it.

        Raises:
            ServerError: not all of the object lies inside of the pool, or /dev/shm is full.
        """
        last_offset, last_size = pool.segment.slices[-1]
        pool.view(slot, last_offset + last_size)
        return pool.prepare(slot + part.offset, part.size)

    def _require_blocks(self, copies: Sequence[ObjectCopy], *, may_skip: bool) -> None:
        """Every block may be copied, and belongs to one page of the job: vLLM gives a block to one group at a time.

        Raises:
            LocalError: the null block, one that does not exist, or one that is named twice; of two copies into one
                page the second would replace the first after its checksum was taken.
        """
        ids = [block for copy in copies for blocks in copy.blocks for block in blocks]
        named = [block for block in ids if block != SKIP] if may_skip else ids
        if named and not NULL_BLOCK < min(named) <= max(named) < self._pages.num_blocks:
            raise LocalError(f"no block to copy among {named}: there are {self._pages.num_blocks}, 0 is null")
        if len(set(named)) != len(named):
            twice = next(block for block in named if named.count(block) > 1)
            raise LocalError(f"block {twice} is named twice in one job")

    def _spans(self, copy: ObjectCopy, part: Slice) -> Spans:
        """The payload as byte runs.

        Raises:
            LocalError: it needs more pieces than there are slots.
        """
        payload = spans(copy.blocks, self._pages, part.capacity)
        if len(payload) and payload.piece[-1] >= len(copy.slots):
            needed = int(payload.piece[-1]) + 1
            raise LocalError(f"the payload needs {needed} pieces, the job has {len(copy.slots)} slots")
        return payload

    def _payload_bytes(self, copy: ObjectCopy) -> int:
        pages = self._pages.group_page_bytes
        return sum(len(ids) * page for ids, page in zip(copy.blocks, pages, strict=True))

    def _seals(self, copy: ObjectCopy, slices: list[Bytes], pool: MappedPool) -> list[Seal]:
        if self._integrity is Integrity.OFF:
            return []
        part, layout_digest = self._slice(pool), layout_in(pool.segment.namespace, self._layout_digest)
        payload_bytes = self._payload_bytes(copy)
        return [
            check_seal(
                view[part.capacity :].tobytes(),
                layout_digest=layout_digest,
                object_digest=copy.digest,
                rank=self._rank,
                piece=piece,
                pieces=len(slices),
                payload_bytes=piece_bytes(payload_bytes, part.capacity, piece),
            )
            for piece, view in enumerate(slices)
        ]

    # --- ends -------------------------------------------------------------------------------------------------------

    def _report(self, running: Running) -> JobReport:
        bad: tuple[int, ...] = ()
        copy, job = running.copy, running.job
        try:
            if running.failure is None and copy is not None:
                if isinstance(job, StoreJob):
                    self._seal(job.object, copy, running.pool)
                else:
                    bad = self._wrong_arrivals(job, copy)
        except Exception as error:
            fail(running, error)
        if running.bad_seals:
            outcome, why, bad = JobOutcome.BAD_SEAL, running.failure or "", running.bad_seals
        elif running.failure is not None:
            outcome, why = JobOutcome.COPY_FAILED, running.failure
        elif bad:
            outcome, why = JobOutcome.BAD_CHECKSUM, f"{len(bad)} objects did not arrive as they were sealed"
        else:
            outcome, why = JobOutcome.DONE, ""
        return JobReport(job.job_id, self._rank, outcome, why, bad)

    def _copied_bytes(self, job: StoreJob | LoadJob, report: JobReport) -> int:
        if report.outcome is not JobOutcome.DONE:
            return 0
        pages = self._pages.group_page_bytes
        objects = (job.object,) if isinstance(job, StoreJob) else job.objects
        return sum(
            (len(ids) - ids.count(SKIP)) * page
            for copy in objects
            for ids, page in zip(copy.blocks, pages, strict=True)
        )

    def _seal(self, stored: ObjectCopy, copy: Copy, pool: MappedPool) -> None:
        """The payload is in the slots: vouch for it. No seal is written unless all can be."""
        part, layout_digest = self._slice(pool), layout_in(pool.segment.namespace, self._layout_digest)
        payload_bytes = self._payload_bytes(stored)
        seals = [
            Seal(
                layout_digest=layout_digest,
                object_digest=stored.digest,
                rank=self._rank,
                piece=piece,
                pieces=len(copy.slices),
                payload_bytes=piece_bytes(payload_bytes, part.capacity, piece),
                checksum=checksum,
                nonce=self._nonce,
            ).encode()
            for piece, (_, checksum) in enumerate(zip(copy.slices, copy.checksums, strict=True))
        ]
        for view, seal in zip(copy.slices, seals, strict=True):
            if view is not None:
                view[part.capacity :] = _as_bytes(seal)

    def _wrong_arrivals(self, job: LoadJob, copy: Copy) -> tuple[int, ...]:
        """Indices of the load's objects that are not what was sealed.

        Raises:
            Exception: the copy failed.
        """
        arrived = copy.checksums
        if self._integrity is not Integrity.CHECKSUM:
            return ()
        right = [checksum == seal.checksum for checksum, seal in zip(arrived, copy.seals, strict=True)]
        object_of = [index for index, loaded in enumerate(job.objects) for _ in loaded.slots]
        return tuple(sorted({index for index, fits in zip(object_of, right, strict=True) if not fits}))


def _required(fence: Fence | None) -> Fence:
    if fence is None:
        raise LocalError("no fence could be recorded on the compute stream")
    return fence


def fail(running: Running, error: Exception) -> None:
    """The job will end as failed; the first reason counts."""
    if running.failure is None:
        running.failure = str(error) or type(error).__name__
        unforeseen = None if isinstance(error, SafeError) else error
        logger.warning("job %d could not be copied: %s", running.job.job_id, running.failure, exc_info=unforeseen)


def _is_over(running: Running) -> bool:
    try:
        return running.over
    except Exception as error:  # the device is lost, and with it its copies
        fail(running, error)
        return True


def _as_bytes(data: bytes) -> Bytes:
    assert len(data) == SEAL_BYTES
    return np.frombuffer(data, dtype=np.uint8)
