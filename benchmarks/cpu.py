"""What needs no GPU: the reference backend, and the arithmetic that the copy thread does for each object."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.gpu_world import Geometry, Pages, attention, checksum, hybrid
from benchmarks.measure import GB, US, median_seconds
from benchmarks.runner import Row, WrongBytesError
from lmcache_mp_safe.ops.reference import InlineFence, ReferenceBackend


class ReferenceCopies:
    key = "reference"
    description = "The reference backend in CPU memory, copies with checksums, against np.copyto of the same bytes."

    def can_run(self) -> str | None:
        return None

    def run(self, quick: bool) -> Iterator[Row]:
        for geometry in (hybrid(64 << 10), attention()):
            yield from self._rows(geometry, 3 if quick else 9)

    def _rows(self, geometry: Geometry, repeats: int) -> Iterator[Row]:
        pages, size = Pages(geometry, 1, "cpu"), geometry.payload_bytes
        backend, fence = ReferenceBackend([pages.buffer.numpy()], "benchmark"), InlineFence()
        slot, plain = np.ones(size, np.uint8), np.ones(size, np.uint8)
        source, target = pages.spans(pages.sources[0]), pages.spans(pages.targets[0])
        floor = size / median_seconds(lambda: np.copyto(plain, slot), repeats)
        ways: dict[str, Callable[[], object]] = {
            "store": lambda: backend.copy_out(source, [slot], fence),
            "load": lambda: backend.copy_in(target, [slot], fence, checked=True),
            "load, no checksum": lambda: backend.copy_in(target, [slot], fence, checked=False),
        }
        for way, copy in ways.items():
            rate = size / median_seconds(copy, repeats)
            yield Row(
                f"{geometry.name}, {geometry.runs} runs, {size / 1e6:.0f} MB: {way}",
                {"GB/s": rate / GB, "memcpy GB/s": floor / GB, "ratio": rate / floor},
            )
        wanted = pages.payload(pages.sources[0]).numpy()
        arrived = pages.payload(pages.targets[0]).numpy()
        if not np.array_equal(slot, wanted) or not np.array_equal(arrived, wanted):
            raise WrongBytesError(f"geometry {geometry.name}")
        if backend.copy_out(source, [slot], fence).checksums != (checksum(wanted),):
            raise WrongBytesError(f"geometry {geometry.name}: checksum")


class SpanTimes:
    key = "spans"
    description = "Host time to turn the block ids of one object into runs."

    def can_run(self) -> str | None:
        return None

    def run(self, quick: bool) -> Iterator[Row]:
        for geometry in (hybrid(1 << 10), attention()):
            pages = Pages(geometry, 1, "cpu")
            blocks = pages.sources[0]
            found = pages.spans(blocks)
            seconds = median_seconds(functools.partial(pages.spans, blocks), 50 if quick else 500)
            yield Row(f"{geometry.name}, {geometry.runs} runs", {"us": seconds * US, "spans": len(found)})
            if len(found) != geometry.runs or int(found.length.sum()) != geometry.payload_bytes:
                raise WrongBytesError(f"{len(found)} spans instead of {geometry.runs}")
