"""What copies take from the GPU work beside them: the same work with and without copies, in pairs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.copies import WAYS
from benchmarks.gpu_world import Copies, Pages, attention, best_device, copies, hybrid, no_gpu
from lmcache_mp_safe.bench.measure import GB, MS, US, Paired, median_seconds, paired
from lmcache_mp_safe.bench.runner import Check, Row

CHUNK_BYTES = hybrid().payload_bytes  # stolen time is told for this many bytes
WINDOW_S = 0.05
REST_S = 0.005


@dataclass(frozen=True)
class Victim:
    """Work on the compute stream; `times` of it fill a window."""

    name: str
    work: Callable[[], Any]
    times: int


def victims() -> list[Victim]:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    large = torch.randint(0, 256, (2 << 30,), dtype=torch.uint8, device="cuda")
    half = 1 << 30
    made = {"matmul": lambda: torch.mm(a, b, out=c), "stream": lambda: large[:half].copy_(large[half:])}

    return [Victim(name, work, max(4, round(WINDOW_S / _seconds_of(work)))) for name, work in made.items()]


def _seconds_of(work: Callable[[], Any]) -> float:
    def once() -> None:
        work()
        torch.cuda.synchronize()

    return median_seconds(once, 5, warmups=3)


class Window:
    """One window of a victim's work, alone or with copies from its start on."""

    def __init__(self, victim: Victim, made: Copies, way: str, *, checked: bool) -> None:
        self.made = made
        self._victim, self._way, self._checked = victim, way, checked
        self._watch = torch.cuda.Stream()
        self.copied: list[float] = []  # seconds in which copies ran, of each window with copies
        size = made.pages.geometry.payload_bytes
        count = max(4, int(0.2 * GB / size))
        seconds = median_seconds(lambda: made.copy(way, count, checked=checked), 3) / count
        self.copies = max(1, int(0.8 * self.run(0) / seconds))
        self.run(self.copies)

    def alone(self) -> float:
        return self.run(0)

    def loaded(self) -> float:
        return self.run(self.copies)

    def run(self, count: int) -> float:
        """Seconds of the victim's work. Submissions are interleaved, so that neither queue starves."""
        torch.cuda.synchronize()
        time.sleep(REST_S)
        begin, end, copies_end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        begin.record()
        fence = self.made.backend.record_fence()  # before the victim's work: the copies do not wait for it
        begun: list[Any] = []
        for i in range(self._victim.times):
            self._victim.work()
            while len(begun) < count * (i + 1) / self._victim.times:
                begun.append(self.made.submit(self._way, checked=self._checked, fence=fence))
        end.record()
        if begun:
            self._watch.wait_event(begun[-1].event.event)
            copies_end.record(self._watch)
        torch.cuda.synchronize()
        if begun:
            self.copied.append(float(begin.elapsed_time(copies_end)) / 1e3)
        return float(begin.elapsed_time(end)) / 1e3


def row(name: str, victim: str, window: Window, found: Paired, *, judged: bool) -> Row:
    """What the pairs say, for the time in which copies ran and for 184 MB of them."""
    geometry = window.made.pages.geometry
    copied = statistics.median(window.copied)
    size = window.copies * geometry.payload_bytes
    slower, stolen = found.added / copied, found.added * CHUNK_BYTES / size
    values: dict[str, Any] = {
        "slower %": 100 * slower,
        "noise %": 100 * found.noise / copied,
        "stolen us per 184 MB": stolen * US,
        "noise us per 184 MB": found.noise * CHUNK_BYTES / size * US,
        "GB/s meanwhile": size / copied / GB,
        "copying % of the time": 100 * copied / (found.alone + found.added),
        "alone ms": found.alone * MS,
        "spread alone %": 100 * found.spread,
    }
    return Row(name, values, limits(victim, geometry.name, 100 * slower, stolen * US) if judged else ())


def limits(victim: str, geometry: str, slower: float, stolen: float) -> tuple[Check, ...]:
    what = "matmul slower %" if victim == "matmul" else "memory-bound slower %"
    if geometry != "H":  # staged
        return (Check(what, slower, "<=", 8.0),)
    if victim == "matmul":
        return Check(what, slower, "<=", 1.0), Check("stolen us", stolen, "<=", 60.0)
    return (Check(what, slower, "<=", 3.0),)


class Interference:
    key = "interference"
    description = (
        "How much slower a bf16 8192^3 matmul and a 1 GiB copy inside of the GPU are while objects are copied without a"
        " pause (H straight, A staged), and the GPU time that 184 MB of copies take from them. Runs with and without"
        " copies in the order ABBA; noise is the standard error of the result."
    )

    def can_run(self) -> str | None:
        return no_gpu(2 << 30)

    def run(self, quick: bool) -> Iterator[Row]:
        quadruples = 4 if quick else 16
        kind, device = best_device()
        for geometry, objects in ((hybrid(), 4), (attention(), 8)):
            with copies(Pages(geometry, objects), device) as made:
                for victim in victims():
                    for way in WAYS:
                        for checked in (True, False):
                            window = Window(victim, made, way, checked=checked)
                            window.copied.clear()
                            found = paired(window.alone, window.loaded, quadruples)
                            name = f"{geometry.name} {way} ({kind}), {victim.name}{'' if checked else ', no checksum'}"
                            yield row(name, victim.name, window, found, judged=checked)
                made.verify()
            torch.cuda.empty_cache()
