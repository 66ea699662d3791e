"""The streamed backend on a GPU against the reference: bytes of pages and slots, and checksums."""

from __future__ import annotations

import mmap

import numpy as np
import pytest
import torch

from lmcache_mp_safe.contract import SKIP
from lmcache_mp_safe.geometry.spans import Span, Spans
from lmcache_mp_safe.ops.contract import Bytes, Completion
from lmcache_mp_safe.ops.device import Device
from lmcache_mp_safe.ops.reference import InlineFence, ReferenceBackend
from lmcache_mp_safe.ops.streamed import StreamedBackend

pytestmark = pytest.mark.gpu

PAGES_BYTES = 96 << 20
POOL_BYTES = 160 << 20  # three steps of page-locking


@pytest.fixture
def pool() -> Bytes:
    return np.frombuffer(mmap.mmap(-1, POOL_BYTES), np.uint8)


# (shortest, longest run in bytes, alignment of starts and lengths in bytes, share of pages that are not wanted)
KINDS = {
    "long": (600_000, 3_000_000, 256, 0.0),
    "16-token blocks": (65_536, 65_537, 65_536, 0.0),
    "16-token blocks, some local": (32_768, 32_769, 32_768, 0.4),
    "mixed": (1_000, 2_000_000, 16, 0.2),
    "odd": (1, 40_000, 1, 0.2),
}


def payload(kind: str, seed: int, pieces: int) -> tuple[Spans, list[int]]:
    low, high, align, skipped = KINDS[kind]
    random = np.random.default_rng(seed)
    spans: list[Span] = []
    sizes: list[int] = []
    free = [0, 0]
    for piece in range(pieces):
        position = 0
        while position < 12 << 20 and len(spans) < 3000:
            length = max(align, int(random.integers(low, high)) // align * align)
            buffer = int(random.integers(2))
            gap = align * int(random.integers(0, 3))
            if free[buffer] + gap + length > PAGES_BYTES // 2:
                break
            wanted = random.random() >= skipped
            spans.append(Span(buffer, free[buffer] + gap if wanted else SKIP, piece, position, length))
            free[buffer] += gap + length
            position += length
        sizes.append(position)
    return Spans.of(spans), sizes


def finished(completion: Completion) -> Completion:
    torch.cuda.synchronize()
    assert completion.done()
    return completion


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("locked", [True, False], ids=["locked", "not locked"])
def test_copies_and_checksums_are_those_of_the_reference(device: Device, pool: Bytes, kind: str, locked: bool) -> None:
    pages = [torch.randint(0, 256, (PAGES_BYTES // 2,), dtype=torch.uint8, device="cuda") for _ in range(2)]
    mirror = [page.cpu().numpy() for page in pages]
    backend, reference = StreamedBackend(device, pages), ReferenceBackend(mirror, "test")
    memory = backend.adopt(pool)
    if locked:
        memory.make_ready(0, POOL_BYTES)
    spans, sizes = payload(kind, seed=7, pieces=3)
    start = (64 << 20) - 1_234_567 // 4096 * 4096  # over the border of two steps
    slots = [pool[start + sum(sizes[:i]) :][:size] for i, size in enumerate(sizes)]
    every = Spans.of([s._replace(page_offset=max(s.page_offset, 0)) for s in spans])

    out = finished(backend.copy_out(every, slots, backend.record_fence()))
    expected = [np.zeros(size, np.uint8) for size in sizes]
    wanted = reference.copy_out(every, expected, InlineFence())
    assert out.checksums == wanted.checksums
    assert all(np.array_equal(one, other) for one, other in zip(slots, expected, strict=True))

    for page, host in zip(pages, mirror, strict=True):
        page.fill_(3)
        host[:] = 3
    into = finished(backend.copy_in(spans, slots, backend.record_fence(), checked=True))
    assert into.checksums == reference.copy_in(spans, slots, InlineFence(), checked=True).checksums
    assert into.checksums == out.checksums
    assert all(np.array_equal(page.cpu().numpy(), host) for page, host in zip(pages, mirror, strict=True))
    slots[0][len(slots[0]) // 2] ^= 1
    into = finished(backend.copy_in(spans, slots, backend.record_fence(), checked=True))
    assert into.checksums[0] != out.checksums[0]
    backend.drain()
    memory.release()


def test_a_piece_that_is_not_wanted_is_left_alone(device: Device, pool: Bytes) -> None:
    pages = [torch.randint(0, 256, (1 << 20,), dtype=torch.uint8, device="cuda")]
    backend = StreamedBackend(device, pages)
    memory = backend.adopt(pool)
    memory.make_ready(0, 1 << 20)
    spans = Spans.of([Span(0, 0, 0, 0, 1000), Span(0, 4096, 1, 0, 1000)])
    done = finished(backend.copy_out(spans, [None, pool[8192:9192]], backend.record_fence()))
    assert done.checksums[0] == 0
    assert not pool[:8192].any()
    assert np.array_equal(pool[8192:9192], pages[0][4096:5096].cpu().numpy())
    memory.release()
