"""Copies and checksums in CPU memory, against memcpy of the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lmcache_mp_safe.bench.installed import missing_packages
from lmcache_mp_safe.bench.measure import GB, median_seconds
from lmcache_mp_safe.bench.runner import Row, Value, WrongBytesError
from lmcache_mp_safe.geometry.checksum import PayloadChecksum

# Bytes of a layer's page, layers, blocks of an object: the pages of the two models of the wire case, and tiny ones.
SHAPES = {"hybrid": (3_309_568, 16, 1), "attention": (65_536, 36, 16), "tiny pages": (4_096, 16, 512)}


class CpuCopies:
    key = "cpu-copy"
    description = (
        "Store and load of one object by the reference backend in CPU memory, with the checksums that both take,"
        " and the checksum alone, against np.copyto of as many bytes (memcpy); one thread. The blocks of an object"
        " are drawn at random and no two pages are neighbours."
    )

    def can_run(self) -> str | None:
        return missing_packages("torch")

    def run(self, quick: bool) -> Iterator[Row]:
        for name, (page_bytes, layers, blocks) in SHAPES.items():
            yield from self._rows(name, page_bytes, layers // (8 if quick else 1), blocks, 2 if quick else 15)

    def _rows(self, name: str, page_bytes: int, layers: int, blocks: int, repeats: int) -> Iterator[Row]:
        from lmcache_mp_safe.geometry.spans import spans
        from lmcache_mp_safe.ops.reference import InlineFence, ReferenceBackend
        from lmcache_mp_safe.testing.pools import random_buffer, simple_pages

        layout, buffer_bytes = simple_pages([[page_bytes] * layers], 4 * blocks + 2)
        memory = random_buffer(buffer_bytes).numpy()
        drawn = (2 + 2 * np.random.default_rng(0).permutation(2 * blocks)).tolist()
        size = page_bytes * layers * blocks
        source, target = (spans([tuple(ids)], layout, size) for ids in (drawn[:blocks], drawn[blocks:]))
        backend, fence = ReferenceBackend([memory], "benchmark"), InlineFence()
        slot, plain = np.ones(size, np.uint8), np.ones(size, np.uint8)
        ways: dict[str, Callable[[], Any]] = {
            "store": lambda: backend.copy_out(source, [slot], fence),
            "load": lambda: backend.copy_in(target, [slot], fence, checked=True),
            "load, no checksum": lambda: backend.copy_in(target, [slot], fence, checked=False),
            "checksum alone": lambda: checksum(slot),
        }
        floor = size / median_seconds(lambda: np.copyto(plain, slot), repeats)
        for way, work in ways.items():
            rate = size / median_seconds(work, repeats)
            values: dict[str, Value] = {
                "MB": size / 1e6,
                "GB/s": rate / GB,
                "memcpy GB/s": floor / GB,
                "of memcpy's": rate / floor,
            }
            yield Row(f"{name}, {page_bytes / 1024:,.0f} KiB pages, {way}", values)
        pages = memory.reshape(layers, -1, page_bytes)
        wanted, arrived = (
            np.concatenate([pages[layer, block] for layer in range(layers) for block in ids])
            for ids in (drawn[:blocks], drawn[blocks:])
        )
        if not np.array_equal(slot, wanted) or not np.array_equal(arrived, wanted):
            raise WrongBytesError(f"{name}: the pages that were stored and loaded")
        if backend.copy_out(source, [slot], fence).checksums != (checksum(wanted),):
            raise WrongBytesError(f"{name}: the checksum")


def checksum(payload: Any) -> int:
    state = PayloadChecksum()
    state.update(payload)
    return state.intdigest()
