"""Stores and loads through the backend against the bus: one long copy between device memory and page-locked memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu_world import (
    DEVICES,
    DIRECT_ALWAYS,
    DIRECT_NEVER,
    Copies,
    Geometry,
    Pages,
    attention,
    best_device,
    copies,
    device_of,
    equal_runs,
    hybrid,
    no_gpu,
)
from lmcache_mp_safe.bench.measure import GB, MS, US, median_seconds
from lmcache_mp_safe.bench.runner import Check, Row
from lmcache_mp_safe.ops.device import DeviceError

WAYS = ("store", "load")
LEAST_SHARE = {"H": 0.95, "A": 0.85}


class Ceiling:
    """Contiguous copies of an object's size, as many one after the other as are in flight in the measurement."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._device = torch.randint(0, 256, (size,), dtype=torch.uint8, device="cuda")
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=True).fill_(1)
        self._stream = torch.cuda.Stream()
        torch.cuda.synchronize()

    def submit(self, way: str) -> torch.cuda.Event:
        """Queue one; the event is its end."""
        source, target = (self._device, self._host) if way == "store" else (self._host, self._device)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def copy(self, way: str, count: int) -> None:
        for _ in range(count):
            self.submit(way)
        self._stream.synchronize()

    def rate(self, way: str, count: int, repeats: int) -> float:
        """Bytes a second."""
        return count * self._size / median_seconds(lambda: self.copy(way, count), repeats, warmups=2)


def rate_of(made: Copies, way: str, count: int, repeats: int, *, checked: bool = True) -> float:
    size = made.pages.geometry.payload_bytes
    return count * size / median_seconds(lambda: made.copy(way, count, checked=checked), repeats, warmups=2)


def latency_of(made: Copies, way: str, repeats: int, *, checked: bool = True) -> tuple[float, float]:
    """Seconds from submitting one object until it is over, and of these until it is submitted."""
    total, submitting = [], []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        completion = made.submit(way, checked=checked)
        submitting.append(time.perf_counter() - begin)
        while not completion.done():
            pass
        total.append(time.perf_counter() - begin)
    return statistics.median(total), statistics.median(submitting)


def rows(geometry: Geometry, objects: int, repeats: int) -> Iterator[Row]:
    pages = Pages(geometry, objects)
    ceiling = Ceiling(geometry.payload_bytes)
    for kind in DEVICES:
        try:
            device = device_of(kind)
        except DeviceError as error:
            yield Row(f"{geometry.name} {kind}", {"cannot run": str(error)})
            continue
        with copies(pages, device) as made:
            for way in WAYS:
                for checked in (True, False):
                    yield _row(made, ceiling, kind, way, objects, repeats, checked=checked)
            made.verify()


def _row(made: Copies, ceiling: Ceiling, kind: str, way: str, objects: int, repeats: int, *, checked: bool) -> Row:
    geometry = made.pages.geometry
    top = ceiling.rate(way, objects, repeats)
    rate = rate_of(made, way, objects, repeats, checked=checked)
    seconds, submitting = latency_of(made, way, repeats, checked=checked)
    again = ceiling.rate(way, objects, repeats)
    top = (top + again) / 2
    share = rate / top
    judged = checked and kind == "csrc"
    checks = (Check("share of the ceiling", share, ">=", LEAST_SHARE[geometry.name]),) if judged else ()
    values: dict[str, Any] = {
        "objects": objects,
        "GB/s": rate / GB,
        "ceiling GB/s": top / GB,
        "share": share,
        "one object ms": seconds * MS,
        "one object GB/s": geometry.payload_bytes / seconds / GB,
        "submit us": submitting * US,
    }
    return Row(f"{geometry.name} {way} {kind}{'' if checked else ', no checksum'}", values, checks)


class CopyRates:
    key = "copies"
    description = (
        "Stores and loads of objects through the backend, several in flight, as a share of contiguous copies of the"
        " same size: H is a hybrid chunk of 184 MB in 112 long runs, A one of 32 MiB in 512 runs of 64 KiB."
    )

    def can_run(self) -> str | None:
        return no_gpu(2 << 30)

    def run(self, quick: bool) -> Iterator[Row]:
        repeats = 3 if quick else 11
        for geometry, objects in ((hybrid(), 8), (attention(), 24)):
            yield from rows(geometry, objects, repeats)
            torch.cuda.empty_cache()


class RunLengths:
    key = "run-lengths"
    description = (
        "Objects of 64 MiB in runs of one length, all copied straight or all by the staging buffer: where the two are"
        " equally fast is the threshold `direct_bytes`."
    )

    def can_run(self) -> str | None:
        return no_gpu(2 << 30)

    def run(self, quick: bool) -> Iterator[Row]:
        repeats, objects = (3, 2) if quick else (7, 4)
        kind, device = best_device()
        for run_kib in (16, 64, 512, 2048) if quick else (16, 32, 64, 128, 256, 512, 1024, 2048):
            pages = Pages(equal_runs(run_kib << 10), objects)
            values: dict[str, Any] = {"device": kind}
            for name, direct_bytes in (("straight", DIRECT_ALWAYS), ("staged", DIRECT_NEVER)):
                with copies(pages, device, direct_bytes) as made:
                    for way in WAYS:
                        values[f"{way} {name} GB/s"] = rate_of(made, way, objects, repeats) / GB
                    made.verify()
            yield Row(f"runs of {run_kib} KiB", values)
