"""The worker half on a real shared-memory file: bytes, seals, order, and one report a job."""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lmcache_mp_safe.contract import (
    SHARED_MEMORY,
    SKIP,
    Integrity,
    JobOutcome,
    JobReport,
    LoadJob,
    ObjectCopy,
    PoolSegment,
    StepPlan,
    StoreJob,
)
from lmcache_mp_safe.errors import LocalError
from lmcache_mp_safe.geometry.pages import PageLayout
from lmcache_mp_safe.geometry.payload import ObjectLayout, Slice
from lmcache_mp_safe.geometry.seal import decode_seal
from lmcache_mp_safe.geometry.spans import Spans
from lmcache_mp_safe.ids import JobId, RequestId, ServerEpoch
from lmcache_mp_safe.metrics.tally import Sample
from lmcache_mp_safe.ops.contract import Backend, Bytes, SlotMemory
from lmcache_mp_safe.ops.reference import InlineFence, PlainMemory, ReferenceBackend
from lmcache_mp_safe.testing.pools import pool_file, random_buffer, simple_pages
from lmcache_mp_safe.worker.copy_thread import CopyThread
from lmcache_mp_safe.worker.half import WorkerHalf
from lmcache_mp_safe.worker.jobs import UnderWay
from lmcache_mp_safe.worker.pool import MappedPool

BLOCKS = 16
# One append-only group of two layers and one recurrent group of one, in bytes a block.
GROUPS = [[300, 500], [1700]]
PAGES, BUFFER_BYTES = simple_pages(GROUPS, BLOCKS)
CHUNK = ((3, 4), ())
BOUNDARY = ((), (7,))
LAYOUT = ObjectLayout.for_payload([2 * 800, 2 * 800])  # two ranks, two blocks a chunk
SIZE = 16 * LAYOUT.object_bytes
DIGEST = b"d" * 32


class Rank:
    """One rank: its memory and its half."""

    def __init__(self, rank: int = 0, *, pages: PageLayout = PAGES, **options: Any) -> None:
        self.memory = random_buffer(BUFFER_BYTES, seed=rank).numpy()
        backend = options.pop("backend", None) or ReferenceBackend([self.memory], "test")
        self.half = WorkerHalf(rank=rank, pages=pages, backend=backend, **options)

    def page(self, group: int, block: int) -> bytes:
        return b"".join(
            self.memory[s.offset + block * s.stride :][: s.length].tobytes()
            for layer in PAGES.groups[group]
            for s in layer.segments
        )


numbers = itertools.count(1)


@pytest.fixture
def segment() -> Iterator[PoolSegment]:
    with pool_file(SIZE, LAYOUT) as made:
        yield made


def bytes_of(segment: PoolSegment) -> bytearray:
    return bytearray((SHARED_MEMORY / segment.name).read_bytes())


def spoil(segment: PoolSegment, position: int) -> None:
    with (SHARED_MEMORY / segment.name).open("r+b") as file:
        file.seek(position)
        (value,) = file.read(1)
        file.seek(position)
        file.write(bytes([value ^ 1]))


def store(
    rank: Rank, segment: PoolSegment, blocks: Sequence[Sequence[int]], slots: Sequence[int], epoch: int = 1
) -> JobReport:
    copy = ObjectCopy(DIGEST, tuple(tuple(part) for part in blocks), tuple(slots))
    job = StoreJob(JobId(next(numbers)), ServerEpoch(epoch), copy)
    rank.half.begin_step(StepPlan(1, segment, stores=(job,)))
    return only_report(rank)


def load(
    rank: Rank, segment: PoolSegment, blocks: Sequence[Sequence[int]], slots: Sequence[int], **fields: Any
) -> JobReport:
    copy = ObjectCopy(fields.get("digest", DIGEST), tuple(tuple(part) for part in blocks), tuple(slots))
    job = LoadJob(JobId(next(numbers)), ServerEpoch(fields.get("epoch", 1)), RequestId("r"), (copy,))
    rank.half.begin_step(StepPlan(1, segment, loads=(job,)))
    finished = rank.half.poll()
    report = only_report(rank)
    assert finished.received == {"r"}
    assert finished.failed == (set() if report.outcome is JobOutcome.DONE else {"r"})
    assert rank.half.poll().received == frozenset()
    assert rank.half.idle
    return report


def only_report(rank: Rank) -> JobReport:
    report = rank.half.take_report()
    assert report is not None
    assert rank.half.take_report() is None
    (job,) = report.jobs
    return job


def test_stored_chunk_loads_into_other_blocks_and_no_other_byte_changes(segment: PoolSegment) -> None:
    rank = Rank()
    assert store(rank, segment, CHUNK, [0]).outcome is JobOutcome.DONE
    before = rank.memory.copy()
    expected = [rank.page(0, 3), rank.page(0, 4)]
    assert load(rank, segment, ((10, 11), ()), [0]).outcome is JobOutcome.DONE
    assert [rank.page(0, 10), rank.page(0, 11)] == expected
    changed = np.flatnonzero(before != rank.memory)
    targets = {
        byte
        for layer in PAGES.groups[0]
        for s in layer.segments
        for byte in range(s.offset + 10 * s.stride, s.offset + 12 * s.stride)
    }
    assert set(changed.tolist()) <= targets


def test_payload_larger_than_a_slice_is_cut_into_pieces(segment: PoolSegment) -> None:
    rank = Rank()
    blocks = ((1, 2, 3, 4, 5), (6, 7))
    pieces = LAYOUT.pieces([5 * 800 + 2 * 1700] * 2)
    assert pieces == 2
    slots = [3 * LAYOUT.object_bytes, 1 * LAYOUT.object_bytes]
    assert store(rank, segment, blocks, slots).outcome is JobOutcome.DONE
    expected = [rank.page(0, block) for block in blocks[0]] + [rank.page(1, block) for block in blocks[1]]
    assert load(rank, segment, ((11, 12, 13, 14, 15), (8, 9)), slots).outcome is JobOutcome.DONE
    assert [rank.page(0, b) for b in range(11, 16)] + [rank.page(1, b) for b in (8, 9)] == expected


def test_ranks_share_an_object_side_by_side(segment: PoolSegment) -> None:
    ranks = [Rank(0), Rank(1)]
    for rank in ranks:
        assert store(rank, segment, CHUNK, [0]).outcome is JobOutcome.DONE
    for rank in ranks:
        expected = rank.page(0, 3)
        assert load(rank, segment, ((10, 11), ()), [0]).outcome is JobOutcome.DONE
        assert rank.page(0, 10) == expected
    assert ranks[0].page(0, 10) != ranks[1].page(0, 10)


def test_object_of_another_namespace_is_not_accepted(segment: PoolSegment) -> None:
    rank = Rank()
    before = msgspec.structs.replace(segment, namespace="before a reset")
    after = msgspec.structs.replace(segment, namespace="after it", epoch=ServerEpoch(2))
    assert store(rank, before, CHUNK, [0]).outcome is JobOutcome.DONE
    assert load(rank, after, ((10, 11), ()), [0], epoch=2).outcome is JobOutcome.BAD_SEAL


def test_slice_of_another_rank_is_not_accepted(segment: PoolSegment) -> None:
    assert store(Rank(1), segment, CHUNK, [0]).outcome is JobOutcome.DONE
    assert load(Rank(0), segment, ((10, 11), ()), [0]).outcome is JobOutcome.BAD_SEAL


def test_pages_that_are_not_wanted_are_not_written_but_checked(segment: PoolSegment) -> None:
    rank = Rank()
    store(rank, segment, CHUNK, [0])
    before, expected = rank.page(0, 10), rank.page(0, 4)
    assert load(rank, segment, ((SKIP, 11), ()), [0]).outcome is JobOutcome.DONE
    assert (rank.page(0, 10), rank.page(0, 11)) == (before, expected)
    spoil(segment, 5)  # a byte of the page that is not wanted
    assert load(rank, segment, ((SKIP, 11), ()), [0]).outcome is JobOutcome.BAD_CHECKSUM


def test_piece_that_the_server_has_already_is_left_alone(segment: PoolSegment) -> None:
    rank = Rank()
    blocks = ((1, 2, 3, 4, 5), (6, 7))
    assert store(rank, segment, blocks, [SKIP, LAYOUT.object_bytes]).outcome is JobOutcome.DONE
    assert not any(bytes_of(segment)[: LAYOUT.object_bytes])
    part = LAYOUT.slices[0]
    raw = bytes(bytes_of(segment)[LAYOUT.object_bytes + part.seal_offset : LAYOUT.object_bytes + part.size])
    assert (decode_seal(raw).piece, decode_seal(raw).pieces) == (1, 2)


@pytest.mark.parametrize("position", [0, 1, 799, 800, 1599])
def test_one_wrong_payload_byte_is_noticed(segment: PoolSegment, position: int) -> None:
    rank = Rank()
    store(rank, segment, CHUNK, [0])
    spoil(segment, position)
    report = load(rank, segment, ((10, 11), ()), [0])
    assert (report.outcome, report.bad_objects) == (JobOutcome.BAD_CHECKSUM, (0,))


def test_every_wrong_seal_byte_is_noticed_before_anything_is_written(segment: PoolSegment) -> None:
    rank = Rank()
    store(rank, segment, CHUNK, [0])
    part = LAYOUT.slices[0]
    for position in range(part.seal_offset, part.size):
        before = rank.memory.copy()
        spoil(segment, position)
        report = load(rank, segment, ((10, 11), ()), [0])
        assert (report.outcome, report.bad_objects) == (JobOutcome.BAD_SEAL, (0,))
        assert np.array_equal(before, rank.memory)
        spoil(segment, position)
    assert load(rank, segment, ((10, 11), ()), [0]).outcome is JobOutcome.DONE


@pytest.mark.parametrize(
    ("integrity", "payload", "seal"),
    [
        (Integrity.OFF, JobOutcome.DONE, JobOutcome.DONE),
        (Integrity.SEAL, JobOutcome.DONE, JobOutcome.BAD_SEAL),
        (Integrity.CHECKSUM, JobOutcome.BAD_CHECKSUM, JobOutcome.BAD_SEAL),
    ],
)
def test_integrity_setting_decides_what_is_checked(
    segment: PoolSegment, integrity: Integrity, payload: JobOutcome, seal: JobOutcome
) -> None:
    rank = Rank(integrity=integrity)
    store(rank, segment, CHUNK, [0])
    spoil(segment, 0)
    assert load(rank, segment, ((10, 11), ()), [0]).outcome is payload
    spoil(segment, 0)
    spoil(segment, LAYOUT.slices[0].seal_offset)
    assert load(rank, segment, ((10, 11), ()), [0]).outcome is seal


def test_other_object_in_the_slot_is_not_the_promised_one(segment: PoolSegment) -> None:
    rank = Rank()
    store(rank, segment, CHUNK, [0])
    assert load(rank, segment, ((10, 11), ()), [0], digest=b"e" * 32).outcome is JobOutcome.BAD_SEAL


def test_job_of_another_epoch_touches_nothing(segment: PoolSegment) -> None:
    rank = Rank()
    memory = rank.memory.copy()
    assert store(rank, segment, CHUNK, [0], epoch=2).outcome is JobOutcome.STALE_EPOCH
    assert load(rank, segment, ((10, 11), ()), [0], epoch=0).outcome is JobOutcome.STALE_EPOCH
    assert not any(bytes_of(segment))
    assert np.array_equal(memory, rank.memory)


def test_new_epoch_maps_the_new_pool_and_lets_the_old_one_go(segment: PoolSegment) -> None:
    opened: list[MappedPool] = []

    def opening(of: PoolSegment, by: Backend) -> MappedPool:
        opened.append(MappedPool(of, by.adopt))
        return opened[-1]

    rank = Rank(open_pool=opening)
    store(rank, segment, CHUNK, [0])
    with pool_file(SIZE, LAYOUT, epoch=2) as newer:
        assert store(rank, newer, CHUNK, [0], epoch=2).outcome is JobOutcome.DONE
        assert any(bytes_of(newer))
        with pytest.raises(LocalError, match="unmapped"):
            opened[0].view(0, 1)
    assert len(opened) == 2


def test_pool_of_a_server_that_is_gone_is_let_go_with_the_next_plan(segment: PoolSegment) -> None:
    rank = Rank()
    store(rank, segment, CHUNK, [0])
    assert segment.name in Path("/proc/self/maps").read_text()
    rank.half.begin_step(StepPlan(2, None))
    assert segment.name not in Path("/proc/self/maps").read_text()
    assert store(rank, segment, CHUNK, [0]).outcome is JobOutcome.DONE, "it is mapped again when it comes back"


def test_pool_that_is_not_the_proven_one_is_refused_once_an_epoch(segment: PoolSegment) -> None:
    import msgspec

    rank = Rank()
    for wrong in (
        msgspec.structs.replace(segment, inode=segment.inode + 1),
        msgspec.structs.replace(segment, name="nothing-there", epoch=ServerEpoch(2)),
        msgspec.structs.replace(segment, size=2 * segment.size, epoch=ServerEpoch(3)),
    ):
        for expected in (1, 0):
            rank.half.begin_step(StepPlan(1, wrong))
            report = rank.half.take_report()
            assert (0 if report is None else len(report.unusable)) == expected
        assert store(rank, wrong, CHUNK, [0], epoch=wrong.epoch).outcome is JobOutcome.STALE_EPOCH


@pytest.mark.parametrize("slot", [-4096, -1, SIZE, SIZE - LAYOUT.object_bytes + 4096, 2**40])
def test_slot_outside_of_the_pool_ends_the_job_and_touches_nothing(segment: PoolSegment, slot: int) -> None:
    if slot == SKIP:
        slot = -2
    rank = Rank(1)
    memory = rank.memory.copy()
    assert store(rank, segment, CHUNK, [slot]).outcome is JobOutcome.COPY_FAILED
    assert load(rank, segment, ((10, 11), ()), [slot]).outcome is JobOutcome.COPY_FAILED
    assert not any(bytes_of(segment))
    assert np.array_equal(memory, rank.memory)


@pytest.mark.parametrize("block", [BLOCKS, 10_000, -5])
def test_block_that_does_not_exist_ends_the_job(segment: PoolSegment, block: int) -> None:
    rank = Rank()
    store(rank, segment, CHUNK, [0])
    last_page = ((), (block,))
    assert store(rank, segment, last_page, [LAYOUT.object_bytes]).outcome is JobOutcome.COPY_FAILED


def test_null_block_is_never_a_target(segment: PoolSegment) -> None:
    rank = Rank()
    store(rank, segment, CHUNK, [0])
    memory = rank.memory.copy()
    assert load(rank, segment, ((0, 11), ()), [0]).outcome is JobOutcome.COPY_FAILED
    assert np.array_equal(memory, rank.memory)


def test_load_with_no_objects_and_no_epoch_is_a_failed_load(segment: PoolSegment) -> None:
    rank = Rank()
    job = LoadJob(JobId(1), ServerEpoch(0), RequestId("r"), ())
    rank.half.begin_step(StepPlan(1, None, loads=(job,)))
    finished = rank.half.poll()
    assert finished.received == finished.failed == {"r"}


def test_full_shared_memory_is_an_error_of_the_job(segment: PoolSegment, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    report = store(Rank(), segment, CHUNK, [0])
    assert report.outcome is JobOutcome.COPY_FAILED
    assert "enlarge /dev/shm" in report.detail
    assert not any(bytes_of(segment))


# --- order ------------------------------------------------------------------------------------------------------------


class LateCompletion:
    """A copy that ends when the test says so."""

    def __init__(self) -> None:
        self.finished = False
        self.checksums: tuple[int, ...] = ()

    def done(self) -> bool:
        return self.finished


class LateBackend:
    """A device whose copies run later; logs the order of what it is asked."""

    name, why = "late", "test"

    def __init__(self) -> None:
        self.log: list[str] = []
        self.open: list[tuple[LateCompletion, list[Any]]] = []

    def record_fence(self) -> InlineFence:
        self.log.append("fence")
        return InlineFence()

    def copy_out(self, spans: Spans, slots: Sequence[Any], after: Any) -> LateCompletion:
        return self._copy("out", slots)

    def copy_in(self, spans: Spans, slots: Sequence[Any], after: Any, *, checked: bool) -> LateCompletion:
        return self._copy("in", slots)

    def adopt(self, memory: Bytes) -> SlotMemory:
        return PlainMemory()

    def hold_compute(self, until: Any) -> None:
        self.log.append("hold")

    def drain(self) -> None:
        self.log.append("drain")

    def finish(self, *checksums: int) -> None:
        """Every open copy ends."""
        for completion, _ in self.open:
            completion.checksums, completion.finished = checksums, True

    def _copy(self, what: str, slots: Sequence[Any]) -> LateCompletion:
        self.log.append(what)
        completion = LateCompletion()
        self.open.append((completion, list(slots)))
        return completion


def seal_bytes(segment: PoolSegment, slot: int = 0) -> bytes:
    part: Slice = LAYOUT.slices[0]
    return bytes(bytes_of(segment)[slot + part.seal_offset : slot + part.size])


def test_seal_is_cleared_before_the_copy_and_written_after_it(segment: PoolSegment) -> None:
    store(Rank(), segment, CHUNK, [0])
    assert any(seal_bytes(segment))
    backend = LateBackend()
    rank = Rank(backend=backend)
    job = StoreJob(JobId(9), ServerEpoch(1), ObjectCopy(DIGEST, CHUNK, (0,)))
    rank.half.begin_step(StepPlan(1, segment, stores=(job,)))
    assert not any(seal_bytes(segment)), "a reader in between must find no seal"
    assert rank.half.take_report() is None
    completion, slots = backend.open[0]
    slots[0][:10] = 7
    completion.checksums, completion.finished = (123,), True
    assert only_report(rank).outcome is JobOutcome.DONE
    assert decode_seal(seal_bytes(segment)).checksum == 123


def test_fence_comes_before_every_copy_and_a_moved_block_holds_the_forward(segment: PoolSegment) -> None:
    backend = LateBackend()
    rank = Rank(backend=backend)
    job = StoreJob(JobId(9), ServerEpoch(1), ObjectCopy(DIGEST, CHUNK, (0,)))
    rank.half.begin_step(StepPlan(1, segment, stores=(job,)))
    rank.half.begin_step(StepPlan(2, segment, wait_for=(JobId(9), JobId(8))))
    assert backend.log == ["fence", "out", "hold"]


def test_old_pool_stays_mapped_until_its_last_copy_is_done(segment: PoolSegment) -> None:
    backend = LateBackend()
    rank = Rank(backend=backend)
    job = StoreJob(JobId(9), ServerEpoch(1), ObjectCopy(DIGEST, CHUNK, (0,)))
    rank.half.begin_step(StepPlan(1, segment, stores=(job,)))
    with pool_file(SIZE, LAYOUT, epoch=2) as newer:
        rank.half.begin_step(StepPlan(2, newer))
        completion, slots = backend.open[0]
        slots[0][0] = 1  # the copy engine still writes there
        completion.checksums, completion.finished = (1,), True
        assert only_report(rank).outcome is JobOutcome.DONE
        assert rank.half.idle


def test_compute_waits_for_a_job_of_the_same_plan_too(segment: PoolSegment) -> None:
    backend = LateBackend()
    rank = Rank(backend=backend)
    job = StoreJob(JobId(9), ServerEpoch(1), ObjectCopy(DIGEST, CHUNK, (0,)))
    rank.half.begin_step(StepPlan(1, segment, stores=(job,), wait_for=(JobId(9),)))
    assert backend.log == ["fence", "out", "hold"]


def test_many_copies_that_end_at_once_are_taken_over_by_several_hooks(segment: PoolSegment) -> None:
    """Each costs the engine's thread a few microseconds, and there may be hundreds."""
    backend = LateBackend()
    rank = Rank(backend=backend)
    object_ = ObjectCopy(DIGEST, CHUNK, (0,))
    jobs = tuple(StoreJob(JobId(number), ServerEpoch(1), object_) for number in range(100))
    rank.half.begin_step(StepPlan(1, segment, stores=jobs))
    backend.finish(1)
    reported: list[int] = []
    while not rank.half.idle:
        report = rank.half.take_report()
        assert report is not None
        assert len(report.jobs) <= 16
        reported += [job.job_id for job in report.jobs]
    assert reported == list(range(100))


def test_stores_of_a_plan_are_few_copies_and_each_gets_its_own_seal(segment: PoolSegment) -> None:
    backend = LateBackend()
    rank = Rank(backend=backend)
    slots = [n * LAYOUT.object_bytes for n in range(10)]
    jobs = tuple(StoreJob(JobId(n), ServerEpoch(1), ObjectCopy(DIGEST, CHUNK, (s,))) for n, s in enumerate(slots))
    rank.half.begin_step(StepPlan(1, segment, stores=jobs))
    assert backend.log == ["fence", "out", "out"]
    first, second = backend.open
    for (completion, views), numbers in ((first, range(8)), (second, range(8, 10))):
        assert len(views) == len(numbers)
        completion.checksums, completion.finished = tuple(100 + n for n in numbers), True
    report = rank.half.take_report()
    assert report is not None
    assert [job.outcome for job in report.jobs] == [JobOutcome.DONE] * 10
    assert [decode_seal(seal_bytes(segment, slot)).checksum for slot in slots] == [100 + n for n in range(10)]


def test_of_a_plans_stores_only_those_fail_that_cannot_be_stored(segment: PoolSegment) -> None:
    rank = Rank()
    objects = [
        ObjectCopy(DIGEST, blocks, (n * LAYOUT.object_bytes,))
        for n, blocks in enumerate((CHUNK, ((3, 99), ()), BOUNDARY))
    ]
    rank.half.begin_step(
        StepPlan(1, segment, stores=tuple(StoreJob(JobId(n), ServerEpoch(1), one) for n, one in enumerate(objects)))
    )
    report = rank.half.take_report()
    assert report is not None
    assert [job.outcome for job in report.jobs] == [JobOutcome.DONE, JobOutcome.COPY_FAILED, JobOutcome.DONE]
    for slot, blocks in ((0, CHUNK), (2 * LAYOUT.object_bytes, BOUNDARY)):
        assert load(Rank(), segment, blocks, [slot]).outcome is JobOutcome.DONE
    assert not any(seal_bytes(segment, LAYOUT.object_bytes))


# --- failures ---------------------------------------------------------------------------------------------------------


class FailingBackend(LateBackend):
    """Fails at one of its methods."""

    def __init__(self, method: str) -> None:
        super().__init__()

        def failing(*args: Any, **options: Any) -> Any:
            raise RuntimeError(f"{method} failed")

        setattr(self, method, failing)


def two_objects(blocks: tuple[tuple[int, ...], tuple[int, ...]] = ((8, 9), (10, 11))) -> LoadJob:
    objects = tuple(
        ObjectCopy(DIGEST, (part, ()), (slot,)) for part, slot in zip(blocks, (0, LAYOUT.object_bytes), strict=True)
    )
    return LoadJob(JobId(5), ServerEpoch(1), RequestId("r"), objects)


def store_two(segment: PoolSegment) -> None:
    rank = Rank()
    for slot in (0, LAYOUT.object_bytes):
        assert store(rank, segment, CHUNK, [slot]).outcome is JobOutcome.DONE


def test_load_that_cannot_be_queued_fails_with_nothing_under_way(segment: PoolSegment) -> None:
    """All its objects are one copy, so there is no half of it that still writes into blocks which the report frees."""
    store_two(segment)
    backend = FailingBackend("copy_in")
    rank = Rank(backend=backend)
    rank.half.begin_step(StepPlan(1, segment, loads=(two_objects(),)))
    finished = rank.half.poll()
    assert finished.received == finished.failed == {"r"}
    report = only_report(rank)
    assert (report.outcome, report.detail) == (JobOutcome.COPY_FAILED, "copy_in failed")
    assert backend.log == ["fence"]


def test_two_copies_into_one_page_are_refused(segment: PoolSegment) -> None:
    """The second would replace the first after its checksum was taken."""
    store_two(segment)
    rank = Rank()
    memory = rank.memory.copy()
    rank.half.begin_step(StepPlan(1, segment, loads=(two_objects(((8, 9), (8, 11))),)))
    assert only_report(rank).outcome is JobOutcome.COPY_FAILED
    assert np.array_equal(memory, rank.memory)


def test_without_a_fence_nothing_is_copied_and_every_job_is_reported(segment: PoolSegment) -> None:
    store_two(segment)
    backend = FailingBackend("record_fence")
    rank = Rank(backend=backend)
    job = StoreJob(JobId(9), ServerEpoch(1), ObjectCopy(DIGEST, CHUNK, (2 * LAYOUT.object_bytes,)))
    rank.half.begin_step(StepPlan(1, segment, stores=(job,), loads=(two_objects(),)))
    report = rank.half.take_report()
    assert report is not None
    assert [job.outcome for job in report.jobs] == [JobOutcome.COPY_FAILED] * 2
    assert backend.log == []


def test_store_that_compute_cannot_be_held_for_is_never_sealed(segment: PoolSegment) -> None:
    backend = FailingBackend("hold_compute")
    rank = Rank(backend=backend)
    job = StoreJob(JobId(9), ServerEpoch(1), ObjectCopy(DIGEST, CHUNK, (0,)))
    rank.half.begin_step(StepPlan(1, segment, stores=(job,)))
    rank.half.begin_step(StepPlan(2, segment, wait_for=(JobId(9),)))
    assert rank.half.take_report() is None
    backend.finish(1)
    assert only_report(rank).outcome is JobOutcome.COPY_FAILED
    assert not any(seal_bytes(segment))


class BrokenCompletion(LateCompletion):
    """A copy that the device gave up."""

    def __init__(self, *, at: str) -> None:
        self._at = at

    def done(self) -> bool:
        if self._at == "done":
            raise RuntimeError("device lost")
        return True

    @property
    def checksums(self) -> tuple[int, ...]:  # type: ignore[override]
        if self._at == "checksums":
            raise RuntimeError("copy failed")
        return (1, 2, 3)  # not one a piece


@pytest.mark.parametrize("at", ["done", "checksums", "number of checksums"])
@pytest.mark.parametrize("integrity", list(Integrity))
def test_copy_that_fails_late_ends_as_failed_and_unsealed(segment: PoolSegment, at: str, integrity: Integrity) -> None:
    store_two(segment)
    backend = LateBackend()
    backend._copy = lambda what, slots: BrokenCompletion(at=at)  # type: ignore[method-assign]
    rank = Rank(backend=backend, integrity=integrity)
    slot = 2 * LAYOUT.object_bytes
    job = StoreJob(JobId(9), ServerEpoch(1), ObjectCopy(DIGEST, CHUNK, (slot,)))
    rank.half.begin_step(StepPlan(1, segment, stores=(job,)))
    assert only_report(rank).outcome is JobOutcome.COPY_FAILED
    assert not any(seal_bytes(segment, slot))
    rank.half.begin_step(StepPlan(2, segment, loads=(two_objects(),)))
    assert only_report(rank).outcome is JobOutcome.COPY_FAILED


def test_whatever_mapping_raises_makes_the_epoch_unusable_and_not_the_engine(segment: PoolSegment) -> None:
    def no_memory(_: PoolSegment, __: Backend) -> MappedPool:
        raise MemoryError

    rank = Rank(open_pool=no_memory)
    rank.half.begin_step(StepPlan(1, segment))
    assert not rank.half.idle
    report = rank.half.take_report()
    assert report is not None
    assert [(rank_, epoch) for rank_, epoch, _ in report.unusable] == [(0, 1)]


def test_shutdown_waits_for_copies_before_it_unmaps(segment: PoolSegment) -> None:
    opened: list[MappedPool] = []

    def opening(of: PoolSegment, by: Backend) -> MappedPool:
        opened.append(MappedPool(of, by.adopt))
        return opened[-1]

    job = StoreJob(JobId(9), ServerEpoch(1), ObjectCopy(DIGEST, CHUNK, (0,)))
    backend: LateBackend = LateBackend()
    rank = Rank(backend=backend, open_pool=opening)
    rank.half.begin_step(StepPlan(1, segment, stores=(job,)))
    rank.half.shutdown()
    assert backend.log[-1] == "drain"
    with pytest.raises(LocalError, match="unmapped"):
        opened[0].view(0, 1)

    rank = Rank(backend=FailingBackend("drain"), open_pool=opening)
    rank.half.begin_step(StepPlan(1, segment, stores=(job,)))
    rank.half.shutdown()
    assert opened[1].view(0, 1).size == 1, "a copy may still be under way there"


# --- the copy thread --------------------------------------------------------------------------------------------------


def wait_for_report(rank: Rank, seconds: float = 10.0) -> JobReport:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        report = rank.half.take_report()
        if report is not None:
            (job,) = report.jobs
            return job
        time.sleep(0.001)
    raise AssertionError("no report")


def test_jobs_go_over_a_thread_and_come_back_once(segment: PoolSegment) -> None:
    entered: list[str] = []
    queue = CopyThread(lambda: entered.append(threading.current_thread().name))
    rank = Rank(queue=queue)
    copy = ObjectCopy(DIGEST, CHUNK, (0,))
    rank.half.begin_step(StepPlan(1, segment, stores=(StoreJob(JobId(1), ServerEpoch(1), copy),)))
    assert wait_for_report(rank).outcome is JobOutcome.DONE
    load = LoadJob(JobId(2), ServerEpoch(1), RequestId("r"), (ObjectCopy(DIGEST, ((10, 11), ()), (0,)),))
    rank.half.begin_step(StepPlan(2, segment, loads=(load,)))
    assert wait_for_report(rank).outcome is JobOutcome.DONE
    assert rank.half.poll().received == {"r"}
    assert rank.page(0, 10) == rank.page(0, 3)
    assert rank.half.idle
    assert len(entered) == 1
    assert entered[0] != threading.current_thread().name
    rank.half.shutdown()


def test_hooks_do_not_wait_for_the_thread_and_a_copy_that_has_not_begun_is_given_up(segment: PoolSegment) -> None:
    """Its block is about to be written again: the forward cannot wait for a copy that is not queued yet."""
    gate = threading.Event()
    queue = CopyThread(lambda: None)
    queue.submit(gate.wait, 30)
    rank = Rank(queue=queue)
    job = StoreJob(JobId(1), ServerEpoch(1), ObjectCopy(DIGEST, CHUNK, (0,)))
    rank.half.begin_step(StepPlan(1, segment, stores=(job,)))
    rank.half.begin_step(StepPlan(2, segment, wait_for=(JobId(1),)))
    assert rank.half.take_report() is None, "the thread still has it in its hands"
    gate.set()
    report = wait_for_report(rank)
    assert report.outcome is JobOutcome.COPY_FAILED
    assert "written again" in report.detail
    assert not any(bytes_of(segment))
    rank.half.shutdown()


def test_shutdown_drops_what_was_not_begun(segment: PoolSegment) -> None:
    gate = threading.Event()
    queue = CopyThread(lambda: None)
    queue.submit(gate.wait, 30)
    rank = Rank(queue=queue)
    job = StoreJob(JobId(1), ServerEpoch(1), ObjectCopy(DIGEST, CHUNK, (0,)))
    rank.half.begin_step(StepPlan(1, segment, stores=(job,)))
    threading.Timer(0.05, gate.set).start()
    rank.half.shutdown()
    assert not any(bytes_of(segment))


def test_load_goes_before_the_stores_that_have_not_begun(segment: PoolSegment) -> None:
    gate, order = threading.Event(), list[str]()

    class Noting(ReferenceBackend):
        def copy_out(self, *arguments: Any) -> Any:
            order.append("store")
            return super().copy_out(*arguments)

        def copy_in(self, *arguments: Any, **options: Any) -> Any:
            order.append("load")
            return super().copy_in(*arguments, **options)

    store(Rank(), segment, CHUNK, [0])
    queue = CopyThread(lambda: None)
    queue.submit(gate.wait, 30)
    rank = Rank(queue=queue, backend=Noting([random_buffer(BUFFER_BYTES).numpy()], "test"))
    slots = [(1 + number) * LAYOUT.object_bytes for number in range(10)]
    stores = tuple(StoreJob(JobId(n), ServerEpoch(1), ObjectCopy(DIGEST, CHUNK, (s,))) for n, s in enumerate(slots))
    rank.half.begin_step(StepPlan(1, segment, stores=stores))
    load = LoadJob(JobId(99), ServerEpoch(1), RequestId("r"), (ObjectCopy(DIGEST, ((10, 11), ()), (0,)),))
    rank.half.begin_step(StepPlan(2, segment, loads=(load,)))
    gate.set()
    reports: list[JobReport] = []
    end = time.monotonic() + 10
    while len(reports) < 11 and time.monotonic() < end:
        report = rank.half.take_report()
        reports += report.jobs if report is not None else ()
        time.sleep(0.001)
    assert {report.outcome for report in reports} == {JobOutcome.DONE}
    assert len(reports) == 11
    assert order == ["load", "store", "store"]
    rank.half.shutdown()


def test_thread_that_cannot_use_its_device_still_runs_what_it_is_given(caplog: pytest.LogCaptureFixture) -> None:
    def enter() -> None:
        raise RuntimeError("no device")

    queue, ran = CopyThread(enter), threading.Event()
    queue.submit(ran.set)
    assert ran.wait(10)
    queue.shutdown()


def test_no_hook_asks_the_device_whether_a_copy_is_over(segment: PoolSegment) -> None:
    """While the thread submits, the driver lets nobody in: a question would wait for it."""
    asked: set[str] = set()
    gate = threading.Event()

    class Slow:
        checksums = (7,)

        def done(self) -> bool:
            asked.add(threading.current_thread().name)
            return gate.is_set()

    class Noting(ReferenceBackend):
        def copy_out(self, *arguments: Any) -> Any:
            super().copy_out(*arguments)
            return Slow()

    backend = Noting([random_buffer(BUFFER_BYTES).numpy()], "test")
    rank = Rank(queue=CopyThread(lambda: None), backend=backend)
    job = StoreJob(JobId(1), ServerEpoch(1), ObjectCopy(DIGEST, CHUNK, (0,)))
    rank.half.begin_step(StepPlan(1, segment, stores=(job,)))
    for _ in range(20):
        rank.half.poll()
        assert rank.half.take_report() is None
        time.sleep(0.001)
    gate.set()
    assert wait_for_report(rank).outcome is JobOutcome.DONE
    assert asked
    assert threading.current_thread().name not in asked
    rank.half.shutdown()


@pytest.mark.parametrize("urgent", [False, True])
def test_threads_take_shorter_turns_only_while_something_urgent_is_to_be_copied(urgent: bool) -> None:
    usual = sys.getswitchinterval()
    queue = CopyThread(lambda: None)
    seen: list[float] = []
    left = [UnderWay.LOADS] * 3 if urgent else [UnderWay.STORES] * 3

    def look() -> UnderWay:
        if not seen:
            return UnderWay.NOTHING
        seen.append(sys.getswitchinterval())
        return left.pop() if left else UnderWay.NOTHING

    queue.watch(look)
    queue.submit(lambda: seen.append(sys.getswitchinterval()), urgent=urgent)
    end = time.monotonic() + 10
    while (left or not seen or sys.getswitchinterval() != usual) and time.monotonic() < end:
        time.sleep(0.001)
    queue.shutdown()
    assert sys.getswitchinterval() == usual
    assert len(seen) >= 4
    assert [interval < usual for interval in seen[:4]] == [urgent] * 4


# --- what is counted ------------------------------------------------------------------------------------------------


def test_copies_are_counted_by_outcome_with_their_bytes_and_times(segment: PoolSegment) -> None:
    ticks = itertools.count()
    rank = Rank(clock=lambda: float(next(ticks)))  # every look at the clock is a second later
    store(rank, segment, CHUNK, [0])
    load(rank, segment, ((5, SKIP), ()), [0])
    spoil(segment, 100)
    load(rank, segment, ((5, 6), ()), [0])
    store(rank, segment, CHUNK, [0], epoch=7)
    page = sum(GROUPS[0])
    assert rank.half.take_sample() == Sample(
        sums={
            "job:done": 2, "copied:store": 2 * page, "copied:load": page, "job:bad_checksum": 1, "job:stale_epoch": 1,
        },
        times={"copy:store": [1.0], "copy:load": [1.0, 1.0]},
    )  # fmt: skip
    assert rank.half.take_sample() is None
