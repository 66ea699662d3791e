"""Deliberate mistakes in the worker half. Each check passes as it is, and each mistake makes its check fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from lmcache_mp_safe.contract import (
    SHARED_MEMORY,
    JobOutcome,
    JobReport,
    LoadJob,
    ObjectCopy,
    PoolSegment,
    StepPlan,
    StoreJob,
)
from lmcache_mp_safe.geometry.payload import ObjectLayout
from lmcache_mp_safe.geometry.spans import Spans
from lmcache_mp_safe.ids import JobId, RequestId, ServerEpoch
from lmcache_mp_safe.ops.contract import Bytes, Fence, SlotMemory
from lmcache_mp_safe.ops.reference import InlineFence, PlainMemory, ReferenceBackend
from lmcache_mp_safe.testing.pools import pool_file, random_buffer, simple_pages
from lmcache_mp_safe.worker import copier as copier_module
from lmcache_mp_safe.worker.copier import Copier
from lmcache_mp_safe.worker.half import WorkerHalf
from lmcache_mp_safe.worker.jobs import Running

PAGE = 600
PAGES, BUFFER_BYTES = simple_pages([[PAGE]], 8)
LAYOUT = ObjectLayout.for_payload([2 * PAGE])
PART = LAYOUT.slices[0]
DIGEST = b"d" * 32


# --- a device in small ------------------------------------------------------------------------------------------------


class Mark:
    """A fence: passed once everything queued before it has run."""

    def __init__(self, device: Device) -> None:
        self._device, self._position = device, device.queued

    def passed(self) -> bool:
        return self._device.ran >= self._position


class Copying:
    """A copy that runs once its fence has passed and the copy engine is allowed to."""

    def __init__(self, device: Device, act: Callable[[], tuple[int, ...]], after: Fence) -> None:
        self._device, self._act, self._after = device, act, after
        self._checksums: tuple[int, ...] | None = None

    def done(self) -> bool:
        if self._checksums is None and self._device.may_copy and self._after.passed():
            self._checksums = self._act()
        return self._checksums is not None

    @property
    def checksums(self) -> tuple[int, ...]:
        assert self._checksums is not None, "asked before the copy was over"
        return self._checksums


class Device:
    """A backend whose compute stream is a queue that the test runs, and whose copies run when they may."""

    name, why = "device", "test"

    def __init__(self, memory: Bytes) -> None:
        self.memory = memory
        self.may_copy = True
        self.ran = 0
        self._queue: list[Callable[[], bool]] = []
        self._inline = ReferenceBackend([memory], "test")

    @property
    def queued(self) -> int:
        return self.ran + len(self._queue)

    def write(self, block: int, value: int) -> None:
        """Queue a kernel that fills a block's page."""

        def kernel() -> bool:
            self.memory[block * PAGE : (block + 1) * PAGE] = value
            return True

        self._queue.append(kernel)

    def run(self) -> None:
        """Run the compute stream as far as it gets."""
        while self._queue and self._queue[0]():
            del self._queue[0]
            self.ran += 1

    def record_fence(self) -> Mark:
        return Mark(self)

    def adopt(self, memory: Bytes) -> SlotMemory:
        return PlainMemory()

    def copy_out(self, spans: Spans, slots: Sequence[Bytes | None], after: Fence) -> Copying:
        return Copying(self, lambda: self._inline.copy_out(spans, slots, InlineFence()).checksums, after)

    def copy_in(self, spans: Spans, slots: Sequence[Bytes], after: Fence, *, checked: bool) -> Copying:
        return Copying(
            self, lambda: self._inline.copy_in(spans, slots, InlineFence(), checked=checked).checksums, after
        )

    def hold_compute(self, until: Any) -> None:
        self._queue.append(until.done)

    def drain(self) -> None:
        self.may_copy = True


class Rank:
    def __init__(self) -> None:
        self.memory: Bytes = random_buffer(BUFFER_BYTES).numpy()
        self.device = Device(self.memory)
        self.half = WorkerHalf(rank=0, pages=PAGES, backend=self.device)
        self.reports: dict[int, JobReport] = {}

    def page(self, block: int) -> bytes:
        return self.memory[block * PAGE : (block + 1) * PAGE].tobytes()

    def step(self, segment: PoolSegment, *jobs: StoreJob | LoadJob, wait_for: tuple[int, ...] = ()) -> None:
        stores = tuple(job for job in jobs if isinstance(job, StoreJob))
        loads = tuple(job for job in jobs if isinstance(job, LoadJob))
        waits = tuple(JobId(number) for number in wait_for)
        self.half.begin_step(StepPlan(1, segment, stores, loads, waits))

    def outcome(self, number: int) -> JobOutcome | None:
        report = self.half.take_report()
        self.reports |= {int(job.job_id): job for job in report.jobs} if report is not None else {}
        return self.reports[number].outcome if number in self.reports else None


def storing(number: int, blocks: tuple[int, ...] = (1, 2), *, epoch: int = 1) -> StoreJob:
    return StoreJob(JobId(number), ServerEpoch(epoch), ObjectCopy(DIGEST, (blocks,), (0,)))


def loading(number: int, blocks: tuple[int, ...] = (5, 6), *, epoch: int = 1) -> LoadJob:
    copy = ObjectCopy(DIGEST, (blocks,), (0,))
    return LoadJob(JobId(number), ServerEpoch(epoch), RequestId(str(number)), (copy,))


def pool_bytes(segment: PoolSegment) -> bytes:
    return (SHARED_MEMORY / segment.name).read_bytes()


def seal_in(segment: PoolSegment) -> bytes:
    return pool_bytes(segment)[PART.seal_offset : PART.size]


# --- checks -----------------------------------------------------------------------------------------------------------


def check_seal_follows_payload(segment: PoolSegment) -> None:
    rank = Rank()
    rank.device.may_copy = False
    rank.step(segment, storing(1))
    assert rank.outcome(1) is None
    assert not any(seal_in(segment))
    rank.device.may_copy = True
    assert rank.outcome(1) is JobOutcome.DONE
    assert any(seal_in(segment))


def check_no_seal_while_a_slot_is_written_again(segment: PoolSegment) -> None:
    rank = Rank()
    rank.step(segment, storing(1))
    rank.device.may_copy = False
    rank.step(segment, storing(2, (3, 4)))
    assert not any(seal_in(segment))


def check_wrong_byte_is_noticed(segment: PoolSegment) -> None:
    rank = Rank()
    rank.step(segment, storing(1))
    assert rank.outcome(1) is JobOutcome.DONE
    with (SHARED_MEMORY / segment.name).open("r+b") as file:
        file.write(bytes([pool_bytes(segment)[0] ^ 1]))
    rank.step(segment, loading(2))
    assert rank.outcome(2) is JobOutcome.BAD_CHECKSUM


def check_seal_of_another_namespace_is_noticed(segment: PoolSegment) -> None:
    rank = Rank()
    rank.step(segment, storing(1))
    assert rank.outcome(1) is JobOutcome.DONE
    rank.step(msgspec.structs.replace(segment, namespace="another", epoch=ServerEpoch(2)), loading(2, epoch=2))
    assert rank.outcome(2) is JobOutcome.BAD_SEAL


def check_store_sees_what_was_queued_before_it(segment: PoolSegment) -> None:
    rank = Rank()
    rank.device.write(1, 77)
    rank.step(segment, storing(1))
    assert rank.outcome(1) is None
    rank.device.run()
    assert rank.outcome(1) is JobOutcome.DONE
    assert pool_bytes(segment)[:PAGE] == bytes([77]) * PAGE


def check_load_is_not_overwritten_by_what_was_queued_before_it(segment: PoolSegment) -> None:
    rank = Rank()
    rank.step(segment, storing(1))
    rank.device.write(5, 0)  # the zeroing of a fresh block
    rank.step(segment, loading(2))
    rank.outcome(2)
    rank.device.run()
    assert rank.outcome(2) is JobOutcome.DONE
    assert rank.page(5) == rank.page(1)


def check_forward_waits_for_a_watched_store(segment: PoolSegment) -> None:
    rank = Rank()
    expected = rank.page(1)
    rank.device.may_copy = False
    rank.step(segment, storing(1))
    rank.step(segment, wait_for=(1,))
    rank.device.write(1, 0)  # the forward of that step
    rank.device.run()
    rank.device.may_copy = True
    assert rank.outcome(1) is JobOutcome.DONE
    assert pool_bytes(segment)[:PAGE] == expected


def check_job_is_reported_when_its_copies_are_over(segment: PoolSegment) -> None:
    rank = Rank()
    rank.step(segment, storing(1))
    assert rank.outcome(1) is JobOutcome.DONE
    rank.device.may_copy = False
    rank.step(segment, loading(2))
    assert rank.outcome(2) is None
    assert rank.half.poll().received == frozenset()


def check_null_block_is_not_written(segment: PoolSegment) -> None:
    rank = Rank()
    rank.step(segment, storing(1))
    before = rank.page(0)
    rank.step(segment, loading(2, (0, 6)))
    assert rank.outcome(2) is JobOutcome.COPY_FAILED
    assert rank.page(0) == before


def check_page_is_not_loaded_twice(segment: PoolSegment) -> None:
    rank = Rank()
    rank.step(segment, storing(1))
    rank.step(segment, loading(2, (6, 6)))
    assert rank.outcome(2) is JobOutcome.COPY_FAILED


def check_job_of_another_epoch_touches_nothing(segment: PoolSegment) -> None:
    rank = Rank()
    memory = rank.memory.copy()
    rank.step(segment, storing(1, epoch=2), loading(2, epoch=0))
    assert [rank.outcome(1), rank.outcome(2)] == [JobOutcome.STALE_EPOCH] * 2
    assert not any(pool_bytes(segment))
    assert np.array_equal(memory, rank.memory)


def check_engine_survives_whatever_ends_a_job(segment: PoolSegment) -> None:
    rank = Rank()
    rank.step(segment, storing(1))
    rank.device.copy_in = None  # type: ignore[method-assign, assignment]
    rank.step(segment, loading(2))
    assert rank.outcome(2) is JobOutcome.COPY_FAILED
    assert rank.half.poll().failed == {"2"}


# --- mistakes ---------------------------------------------------------------------------------------------------------

Patch = pytest.MonkeyPatch


def seal_before_copy(patch: Patch) -> None:
    """Takes a copy for done as soon as it is queued; gives the seal some checksum."""
    patch.setattr(Copying, "done", lambda self: True)
    patch.setattr(Copying, "checksums", property(lambda self: (1,)))


def jobs_are_over_at_once(patch: Patch) -> None:
    patch.setattr(Running, "over", property(lambda self: True))
    patch.setattr(Copying, "checksums", property(lambda self: (1,)))


def old_seal_stays(patch: Patch) -> None:
    real = copier_module._as_bytes
    patch.setattr(copier_module, "_as_bytes", lambda data: real(data) if any(data) else real(b"x" * len(data)))


def checksum_off(patch: Patch) -> None:
    patch.setattr(Copier, "_wrong_arrivals", lambda self, job, copy: ())


def any_namespace_goes(patch: Patch) -> None:
    patch.setattr(copier_module, "layout_in", lambda namespace, layout_digest: layout_digest)


def no_fence(patch: Patch) -> None:
    patch.setattr(WorkerHalf, "_record_fence", lambda self: InlineFence())


def compute_is_not_held(patch: Patch) -> None:
    patch.setattr(WorkerHalf, "_hold_compute", lambda self, running: None)


def any_block_goes(patch: Patch) -> None:
    patch.setattr(Copier, "_require_blocks", lambda self, copies, may_skip: None)


def any_epoch_goes(patch: Patch) -> None:
    real = WorkerHalf._start

    def start(self: WorkerHalf, jobs: Sequence[Any]) -> None:
        real(self, [msgspec.structs.replace(job, epoch=1) for job in jobs])

    patch.setattr(WorkerHalf, "_start", start)


def failures_are_not_contained(patch: Patch) -> None:
    def fail(running: Running, error: Exception) -> None:
        raise error

    patch.setattr(copier_module, "fail", fail)


Check = Callable[[PoolSegment], None]
MUTANTS: dict[str, tuple[Callable[[Patch], None], Check]] = {
    "seal before copy": (seal_before_copy, check_seal_follows_payload),
    "old seal stays": (old_seal_stays, check_no_seal_while_a_slot_is_written_again),
    "checksum off": (checksum_off, check_wrong_byte_is_noticed),
    "any namespace": (any_namespace_goes, check_seal_of_another_namespace_is_noticed),
    "store without a fence": (no_fence, check_store_sees_what_was_queued_before_it),
    "load without a fence": (no_fence, check_load_is_not_overwritten_by_what_was_queued_before_it),
    "compute is not held": (compute_is_not_held, check_forward_waits_for_a_watched_store),
    "reported while copies run": (jobs_are_over_at_once, check_job_is_reported_when_its_copies_are_over),
    "null block": (any_block_goes, check_null_block_is_not_written),
    "page twice": (any_block_goes, check_page_is_not_loaded_twice),
    "any epoch": (any_epoch_goes, check_job_of_another_epoch_touches_nothing),
    "failures are not contained": (failures_are_not_contained, check_engine_survives_whatever_ends_a_job),
}


def run(check: Check) -> None:
    with pool_file(4 * LAYOUT.object_bytes, LAYOUT) as segment:
        check(segment)


@pytest.mark.parametrize("name", MUTANTS)
def test_check_passes_without_a_mistake(name: str) -> None:
    run(MUTANTS[name][1])


@pytest.mark.parametrize("name", MUTANTS)
def test_mistake_is_caught_by_its_check(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, check = MUTANTS[name]
    mutate(monkeypatch)
    with pytest.raises((AssertionError, TypeError)):
        run(check)
