"""Any layout, any blocks, any cut into pieces: what is loaded is what was stored, and nothing else is touched."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_mp_safe.contract import (
    SHARED_MEMORY,
    SKIP,
    JobOutcome,
    LoadJob,
    ObjectCopy,
    PoolSegment,
    StepPlan,
    StoreJob,
)
from lmcache_mp_safe.geometry.pages import Layer, PageLayout, Segment
from lmcache_mp_safe.geometry.payload import ObjectLayout
from lmcache_mp_safe.ids import JobId, RequestId, ServerEpoch
from lmcache_mp_safe.ops.contract import Bytes
from lmcache_mp_safe.ops.reference import ReferenceBackend
from lmcache_mp_safe.testing.pools import pool_file, random_buffer
from lmcache_mp_safe.worker.half import WorkerHalf

BLOCKS = 12
DIGEST = b"d" * 32
EPOCH = ServerEpoch(1)


@dataclass
class Case:
    """Pages of one rank, the blocks of an object in it, and other blocks to load it into.

    Attributes:
        piece_bytes: payload that a piece is made for; slices are aligned, so there is room for more.
    """

    pages: PageLayout
    buffers: list[int]
    source: tuple[tuple[int, ...], ...]
    target: tuple[tuple[int, ...], ...]
    piece_bytes: int

    @property
    def payload_bytes(self) -> int:
        return sum(len(ids) * size for ids, size in zip(self.source, self.pages.group_page_bytes, strict=True))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Groups of layers of one to three segments, with gaps, over memory of their own; often several pieces."""
    number_of_groups = draw(st.integers(1, 3))
    buffers: list[int] = []
    groups: list[tuple[Layer, ...]] = []
    for group in range(number_of_groups):
        layers: list[Layer] = []
        for index in range(draw(st.integers(1, 2))):
            segments: list[Segment] = []
            end = draw(st.integers(0, 9))
            for _ in range(draw(st.integers(1, 3))):
                length = draw(st.integers(1, 700))
                stride = length + draw(st.sampled_from([0, 0, 5]))
                segments.append(Segment(len(buffers), end, stride, length))
                end += stride * BLOCKS + draw(st.integers(0, 3))
            buffers.append(end)
            layers.append(Layer(f"g{group}.{index}", tuple(segments), "uint8"))
        groups.append(tuple(layers))
    order = draw(st.permutations(range(1, BLOCKS)))
    counts = [draw(st.integers(0, 5 // number_of_groups)) for _ in groups]
    ids = iter(order)
    source = tuple(tuple(itertools.islice(ids, count)) for count in counts)
    target = tuple(tuple(SKIP if draw(st.booleans()) else b for b in itertools.islice(ids, n)) for n in counts)
    return Case(PageLayout(tuple(groups), BLOCKS), buffers, source, target, draw(st.integers(1, 5000)))


def page(case: Case, memory: list[Bytes], group: int, block: int) -> list[bytes]:
    return [
        memory[s.buffer][s.offset + block * s.stride :][: s.length].tobytes()
        for layer in case.pages.groups[group]
        for s in layer.segments
    ]


@contextmanager
def stored(case: Case) -> Iterator[tuple[WorkerHalf, PoolSegment, list[Bytes], tuple[int, ...], ObjectLayout]]:
    """The case's source blocks, stored as rank 1 of 2."""
    layout = ObjectLayout.for_payload([64, case.piece_bytes])
    pieces = layout.pieces([0, case.payload_bytes])
    slots = tuple(number * layout.object_bytes for number in reversed(range(pieces)))
    memory = [random_buffer(size, seed=number).numpy() for number, size in enumerate(case.buffers)]
    half = WorkerHalf(rank=1, pages=case.pages, backend=ReferenceBackend(memory, "test"))
    with pool_file(pieces * layout.object_bytes, layout) as segment:
        job = StoreJob(JobId(1), EPOCH, ObjectCopy(DIGEST, case.source, slots))
        half.begin_step(StepPlan(1, segment, stores=(job,)))
        assert outcome(half) is JobOutcome.DONE
        yield half, segment, memory, slots, layout
        half.shutdown()


def outcome(half: WorkerHalf) -> JobOutcome:
    report = half.take_report()
    assert report is not None
    (job,) = report.jobs
    return job.outcome


def load(half: WorkerHalf, segment: PoolSegment, case: Case, slots: tuple[int, ...]) -> JobOutcome:
    job = LoadJob(JobId(2), EPOCH, RequestId("r"), (ObjectCopy(DIGEST, case.target, slots),))
    half.begin_step(StepPlan(2, segment, loads=(job,)))
    finished = half.poll()
    result = outcome(half)
    assert finished.received == {"r"}
    assert bool(finished.failed) == (result is not JobOutcome.DONE)
    return result


@settings(deadline=None, max_examples=60)
@given(cases())
def test_loaded_pages_are_the_stored_ones_and_no_other_byte_changes(case: Case) -> None:
    with stored(case) as (half, segment, memory, slots, _):
        expected = [part.copy() for part in memory]
        for group, (sources, targets) in enumerate(zip(case.source, case.target, strict=True)):
            for source, target in zip(sources, targets, strict=True):
                for s in (s for layer in case.pages.groups[group] for s in layer.segments if target != SKIP):
                    new = memory[s.buffer][s.offset + source * s.stride :][: s.length]
                    expected[s.buffer][s.offset + target * s.stride :][: s.length] = new
        before = (SHARED_MEMORY / segment.name).read_bytes()
        assert load(half, segment, case, slots) is JobOutcome.DONE
        assert all(np.array_equal(found, wanted) for found, wanted in zip(memory, expected, strict=True))
        assert (SHARED_MEMORY / segment.name).read_bytes() == before


@settings(deadline=None, max_examples=60)
@given(cases())
def test_store_writes_its_own_payload_and_seals_only(case: Case) -> None:
    with stored(case) as (_, segment, memory, slots, layout):
        part = layout.slices[1]
        left = b"".join(
            b"".join(column)
            for group, ids in enumerate(case.source)
            for layer in range(len(case.pages.groups[group]))
            for column in _columns(case, memory, group, layer, ids)
        )
        raw = (SHARED_MEMORY / segment.name).read_bytes()
        for slot in slots:
            piece, left = left[: part.capacity], left[part.capacity :]
            slot_bytes = raw[slot : slot + layout.object_bytes]
            assert not any(slot_bytes[: part.offset]), "another rank's slice"
            assert slot_bytes[part.offset :][: len(piece)] == piece
            assert not any(slot_bytes[part.offset + len(piece) : part.seal_offset])
        assert not left


def _columns(
    case: Case, memory: list[Bytes], group: int, layer: int, ids: tuple[int, ...]
) -> Iterator[tuple[bytes, ...]]:
    for s in case.pages.groups[group][layer].segments:
        yield tuple(memory[s.buffer][s.offset + b * s.stride :][: s.length].tobytes() for b in ids)


@settings(deadline=None, max_examples=100)
@given(cases(), st.data())
def test_every_changed_byte_of_payload_or_seal_is_noticed_and_no_other_one_matters(
    case: Case, data: st.DataObject
) -> None:
    with stored(case) as (half, segment, _, slots, layout):
        part = layout.slices[1]
        piece = data.draw(st.integers(0, len(slots) - 1))
        at = data.draw(st.integers(0, layout.object_bytes - 1))
        flip = data.draw(st.integers(1, 255))
        with (SHARED_MEMORY / segment.name).open("r+b") as file:
            file.seek(slots[piece] + at)
            (value,) = file.read(1)
            file.seek(slots[piece] + at)
            file.write(bytes([value ^ flip]))
        used = min(part.capacity, case.payload_bytes - piece * part.capacity)
        result = load(half, segment, case, slots)
        if part.seal_offset <= at < part.offset + part.size:
            assert result is JobOutcome.BAD_SEAL
        elif part.offset <= at < part.offset + used:
            assert result is JobOutcome.BAD_CHECKSUM
        else:
            assert result is JobOutcome.DONE
