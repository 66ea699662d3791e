"""The streamed backend on a device in small: bytes and checksums as the reference's, order, rounds and page-locking."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache_mp_safe.contract import SKIP
from lmcache_mp_safe.errors import LocalError
from lmcache_mp_safe.geometry.checksum import TILE_BYTES
from lmcache_mp_safe.geometry.spans import Span, Spans
from lmcache_mp_safe.ops import pinning, streamed, submission
from lmcache_mp_safe.ops.contract import Bytes
from lmcache_mp_safe.ops.device import Command, DeviceError
from lmcache_mp_safe.ops.pinning import PinnedMemory
from lmcache_mp_safe.ops.reference import InlineFence, ReferenceBackend
from lmcache_mp_safe.ops.streamed import StreamedBackend
from lmcache_mp_safe.testing import sim_device
from lmcache_mp_safe.testing.pools import random_buffer
from lmcache_mp_safe.testing.sim_device import SimDevice

PAGE_BYTES = 300_000


class Bench:
    """A device, two buffers of pages, a pool, and the same pages for the reference."""

    def __init__(self, *, staging_bytes: int = 8 * TILE_BYTES, direct_bytes: int = 1000, **options: Any) -> None:
        self.device = SimDevice(**options)
        self.pages = [random_buffer(PAGE_BYTES, seed) for seed in (1, 2)]
        self.expected = [page.numpy().copy() for page in self.pages]
        self.backend = StreamedBackend(self.device, self.pages, staging_bytes=staging_bytes, direct_bytes=direct_bytes)
        self.reference = ReferenceBackend(self.expected, "test")
        self.pool: Bytes = np.zeros(1 << 20, np.uint8)
        self.memory = self.backend.adopt(self.pool)
        self.memory.make_ready(0, len(self.pool))

    def slots(self, sizes: Sequence[int]) -> list[Bytes]:
        ends = np.cumsum(sizes)
        return [self.pool[end - size : end] for end, size in zip(ends, sizes, strict=True)]


@st.composite
def payloads(draw: st.DrawFn) -> tuple[Spans, list[int]]:
    """Runs of one to three pieces, each run somewhere else in the pages."""
    free = [0, 0]
    spans: list[Span] = []
    sizes: list[int] = []
    for piece in range(draw(st.integers(1, 3))):
        position = 0
        for _ in range(draw(st.integers(1, 12))):
            buffer = draw(st.integers(0, 1))
            length = draw(st.sampled_from([1, 15, 16, 17, 500, 999, 1000, 1024, 5000, TILE_BYTES, TILE_BYTES + 1]))
            start = free[buffer] + draw(st.integers(0, 3))
            free[buffer] = start + length
            wanted = draw(st.integers(0, 4)) > 0
            spans.append(Span(buffer, start if wanted else SKIP, piece, position, length))
            position += length
        sizes.append(position)
    return Spans.of(spans), sizes


def wanted_only(spans: Spans) -> Spans:
    """The same with a page for everything."""
    free = PAGE_BYTES
    found = []
    for span in spans:
        if span.page_offset == SKIP:
            free -= span.length
            span = span._replace(buffer=1, page_offset=free)
        found.append(span)
    return Spans.of(found)


@settings(deadline=None, max_examples=150)
@given(payloads(), st.sampled_from([0, 1000, 10_000]), st.sampled_from([1, 4]), st.integers(0, 1000), st.booleans())
def test_copies_are_those_of_the_reference_in_whatever_order_the_streams_run(
    payload: tuple[Spans, list[int]], direct_bytes: int, staged_tiles: int, seed: int, may_register: bool
) -> None:
    spans, sizes = payload
    staging = 4 * staged_tiles * TILE_BYTES
    bench = Bench(staging_bytes=staging, direct_bytes=direct_bytes, may_register=may_register)
    every = wanted_only(spans)
    slots, reference_slots = bench.slots(sizes), [np.zeros(size, np.uint8) for size in sizes]

    out = bench.backend.copy_out(every, slots, bench.backend.record_fence())
    bench.device.run_some(Random(seed), 100)
    bench.device.run()
    by_reference = bench.reference.copy_out(every, reference_slots, InlineFence())
    assert out.checksums == by_reference.checksums
    assert all(np.array_equal(one, other) for one, other in zip(slots, reference_slots, strict=True))

    for page, expected in zip(bench.pages, bench.expected, strict=True):
        page.zero_()
        expected[:] = 0
    into = bench.backend.copy_in(spans, slots, bench.backend.record_fence(), checked=True)
    bench.device.run_some(Random(seed), 100)
    bench.device.run()
    assert into.checksums == bench.reference.copy_in(spans, slots, InlineFence(), checked=True).checksums
    assert into.checksums == out.checksums
    assert all(np.array_equal(p.numpy(), e) for p, e in zip(bench.pages, bench.expected, strict=True))
    assert np.array_equal(np.concatenate(slots), np.concatenate(reference_slots)), "a load writes no slot"


ONE = Spans.of([Span(0, 100, 0, 0, 5000)])


def test_copy_out_sees_what_was_queued_before_its_fence_and_not_what_came_later() -> None:
    bench = Bench()
    (slot,) = bench.slots([5000])
    bench.device.compute.submit(lambda: bench.pages[0][100:5100].fill_(7))
    copy = bench.backend.copy_out(ONE, [slot], bench.backend.record_fence())
    bench.backend.hold_compute(copy)
    bench.device.compute.submit(lambda: bench.pages[0][100:5100].fill_(9))
    bench.backend._out.synchronize()
    assert (slot == 7).all()
    bench.device.run()
    assert (bench.pages[0][100:5100] == 9).all()


def test_nothing_is_asked_of_a_copy_before_it_is_over() -> None:
    bench = Bench()
    copy = bench.backend.copy_out(ONE, bench.slots([5000]), bench.backend.record_fence())
    assert not copy.done()
    with pytest.raises(LocalError, match="before its copy was over"):
        assert copy.checksums
    bench.device.run()
    assert copy.done()


def test_load_without_checksums_launches_none(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    slots = bench.slots([5000])
    monkeypatch.setattr(sim_device, "_digest", None)
    copy = bench.backend.copy_in(ONE, slots, bench.backend.record_fence(), checked=False)
    bench.device.run()
    assert copy.checksums == (0,)


def test_copy_of_many_pieces_is_two_calls_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """All its rounds, and the end. After each call the interpreter has to be won back from the engine's thread."""
    bench = Bench(direct_bytes=10_000)
    calls: list[int] = []
    submit = bench.device.submit
    monkeypatch.setattr(bench.device, "submit", lambda commands: (calls.append(len(commands)), submit(commands)))
    spans = Spans.of([Span(0, 5000 * n, n // 2, 2500 * (n % 2), 2500) for n in range(20)])
    bench.backend.copy_in(spans, bench.slots([5000] * 10), bench.backend.record_fence(), checked=True)
    assert len(calls) == 2


@pytest.mark.parametrize("limit", ["_TABLE_BYTES", "_GROUP_BYTES"])
@pytest.mark.parametrize("direct_bytes", [1, 10_000])
def test_copy_of_many_groups_is_right(limit: str, direct_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, limit, 100)
    bench = Bench(direct_bytes=direct_bytes)
    slots = bench.slots([5000] * 6)
    spans = Spans.of([Span(0, 5000 * n, n // 2, 2500 * (n % 2), 2500) for n in range(12)])
    out = bench.backend.copy_out(spans, slots, bench.backend.record_fence())
    bench.device.run()
    target = Spans.of([Span(1, 100_000 + 2500 * n, n // 2, 2500 * (n % 2), 2500) for n in range(12)])
    into = bench.backend.copy_in(target, slots, bench.backend.record_fence(), checked=True)
    bench.device.run()
    assert into.checksums == out.checksums
    assert np.array_equal(np.concatenate(slots), bench.pages[1][100_000:130_000].numpy())


def test_first_group_is_submitted_before_the_rounds_of_the_second_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submission, "_GROUP_BYTES", 10_000)
    bench = Bench()
    done: list[str] = []
    submit, compute = bench.device.submit, streamed.rounds
    monkeypatch.setattr(bench.device, "submit", lambda commands: (done.append("submit"), submit(commands)))
    monkeypatch.setattr(streamed, "rounds", lambda *a: (done.append("rounds"), compute(*a))[1])
    spans = Spans.of([Span(0, 5000 * n, n, 0, 5000) for n in range(5)])
    bench.backend.copy_in(spans, bench.slots([5000] * 5), bench.backend.record_fence(), checked=True)
    assert done == ["rounds", "submit"] * 3 + ["submit"]


@pytest.mark.parametrize("bad", [Span(0, PAGE_BYTES - 2, 0, 4, 4), Span(1, -3, 0, 4, 2), Span(0, 0, 0, 7, 4)])
def test_span_outside_of_its_memory_is_found_before_anything_is_submitted(bad: Span) -> None:
    bench = Bench()
    spans = Spans.of([Span(0, 8, 0, 0, 4), bad])
    with pytest.raises(LocalError, match="outside"):
        bench.backend.copy_out(spans, bench.slots([9]), bench.backend.record_fence())
    with pytest.raises(LocalError, match="outside"):
        bench.backend.copy_in(spans, bench.slots([9]), bench.backend.record_fence(), checked=True)
    assert not any(stream.work for stream in bench.device.streams[1:])


def test_store_of_a_page_that_is_not_there_is_refused() -> None:
    bench = Bench()
    with pytest.raises(LocalError, match="every page"):
        bench.backend.copy_out(Spans.of([Span(0, SKIP, 0, 0, 4)]), bench.slots([4]), bench.backend.record_fence())


def test_copy_that_fails_half_way_leaves_nothing_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    submit = bench.device.submit

    def broken(commands: Sequence[Command]) -> None:
        submit(commands[:-3])
        raise DeviceError("no kernel")

    monkeypatch.setattr(bench.device, "submit", broken)
    with pytest.raises(DeviceError, match="no kernel"):
        bench.backend.copy_out(ONE, bench.slots([5000]), bench.backend.record_fence())
    assert not any(stream.work for stream in bench.device.streams[1:])


# --- page-locking -----------------------------------------------------------------------------------------------------

STEP = 1000


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> Bytes:
    return np.zeros(10 * STEP - 500, np.uint8)


def test_pool_is_locked_step_by_step_and_given_back(pool: Bytes) -> None:
    device = SimDevice()
    memory, base = PinnedMemory(device, pool, STEP), int(pool.ctypes.data)
    assert device.registered == {}
    memory.make_ready(1500, 1000)
    memory.make_ready(9200, 300)
    memory.make_ready(1500, 1000)
    assert device.registered == {base + 1000: 1000, base + 2000: 1000, base + 9000: 500}
    assert memory.is_pinned(base + 1000, 2000)
    assert not memory.is_pinned(base + 1000, 2001)
    memory.release()
    assert device.registered == {}
    assert memory.released


def test_no_copy_crosses_the_border_of_two_registrations(pool: Bytes) -> None:
    memory, base = PinnedMemory(SimDevice(), pool, STEP), int(pool.ctypes.data)
    copies = np.array([[9000, base + 900, 2200], [7, base + 500, 300]], np.uint64)
    assert sorted(memory.cut(copies, 1).tolist()) == [
        [7, base + 500, 300],
        [9000, base + 900, 100],
        [9100, base + 1000, 1000],
        [10100, base + 2000, 1000],
        [11100, base + 3000, 100],
    ]
    assert memory.cut(copies[1:], 1).tolist() == copies[1:].tolist()


def test_copies_over_many_steps_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning.PinnedMemory.__init__, "__defaults__", (STEP,))
    bench = Bench()
    slots = bench.slots([4999, 5000])
    spans = Spans.of([Span(0, 0, 0, 0, 4999), Span(1, 10, 1, 0, 5000)])
    bench.backend.copy_out(spans, slots, bench.backend.record_fence())
    bench.device.run()
    assert np.array_equal(slots[0], bench.expected[0][:4999])
    assert np.array_equal(slots[1], bench.expected[1][10:5010])


def test_refusal_to_lock_is_said_once_and_copies_go_by_a_bounded_buffer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(streamed, "BOUNCE_BYTES", TILE_BYTES)
    monkeypatch.setattr(pinning.PinnedMemory.__init__, "__defaults__", (STEP,))
    monkeypatch.setattr(pinning.logger, "propagate", True)
    bench = Bench(may_register=False)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "page-locked" in caplog.text
    size = 5 * TILE_BYTES + 77
    slots, spans = bench.slots([size]), Spans.of([Span(0, 3, 0, 0, size)])
    out = bench.backend.copy_out(spans, slots, bench.backend.record_fence())
    bench.device.run()
    assert np.array_equal(slots[0], bench.expected[0][3 : 3 + size])
    target = Spans.of([Span(1, 5, 0, 0, size)])
    into = bench.backend.copy_in(target, slots, bench.backend.record_fence(), checked=True)
    bench.device.run()
    assert into.checksums == out.checksums
    assert torch.equal(bench.pages[1][5 : 5 + size], bench.pages[0][3 : 3 + size])


def test_old_pools_are_forgotten() -> None:
    bench = Bench()
    bench.memory.release()
    bench.backend.adopt(np.zeros(100, np.uint8))
    assert len(bench.backend._memories) == 1
