"""What copies take from the GPU work beside them: the same work with and without copies, in pairs."""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from benchmarks.copies import WAYS, Ceiling
from benchmarks.gpu_world import Copies, Pages, attention, best_device, copies, hybrid, no_gpu
from lmcache_mp_safe.bench.measure import GB, MS, US, Paired, median_seconds, paired
from lmcache_mp_safe.bench.runner import Check, Row

CHUNK_BYTES = hybrid().payload_bytes  # stolen time is told for this many bytes
WINDOW_S = 0.05
REST_S = 0.005
LEAD_S = 0.005  # of the victim's work is queued before the first copy: submitting one takes up to a millisecond here


@dataclass(frozen=True)
class Victim:
    """Work on the compute stream; `times` of it fill a window, and `lead` of these are ahead of all copies."""

    name: str
    work: Callable[[], Any]
    times: int
    lead: int


def victims() -> list[Victim]:
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    large = torch.randint(0, 256, (2 << 30,), dtype=torch.uint8, device="cuda")
    half = 1 << 30
    made = {"matmul": lambda: torch.mm(a, b, out=c), "stream": lambda: large[:half].copy_(large[half:])}

    return [_victim(name, work) for name, work in made.items()]


def _victim(name: str, work: Callable[[], Any]) -> Victim:
    seconds = _seconds_of(work)
    return Victim(name, work, max(8, round(WINDOW_S / seconds)), math.ceil(LEAD_S / seconds))


def _seconds_of(work: Callable[[], Any]) -> float:
    def once() -> None:
        work()
        torch.cuda.synchronize()

    return median_seconds(once, 5, warmups=3)


class Load(Protocol):
    """Copies that disturb a victim; `size` is the bytes of one."""

    size: int

    def fence(self) -> Any:
        """What the copies submitted with it wait for."""

    def submit(self, fence: Any) -> Any:
        """Queue a copy."""

    def end(self, copy: Any) -> torch.cuda.Event:
        """Of a copy that was queued; good for as long as somebody has the copy."""

    def copy(self, count: int) -> None:
        """Copy, and wait for the end."""


class Objects:
    """Objects through the backend."""

    def __init__(self, made: Copies, way: str, *, checked: bool) -> None:
        self._made, self._way, self._checked = made, way, checked
        self.size = made.pages.geometry.payload_bytes

    def fence(self) -> Any:
        return self._made.backend.record_fence()

    def submit(self, fence: Any) -> Any:
        return self._made.submit(self._way, checked=self._checked, fence=fence)

    def end(self, copy: Any) -> torch.cuda.Event:
        event: torch.cuda.Event = copy.event.event
        return event

    def copy(self, count: int) -> None:
        self._made.copy(self._way, count, checked=self._checked)


class Plain:
    """The floor: contiguous copies of as many bytes, and nothing else."""

    def __init__(self, size: int, way: str) -> None:
        self._ceiling, self._way, self.size = Ceiling(size), way, size

    def fence(self) -> None:
        return None

    def submit(self, fence: Any) -> torch.cuda.Event:
        return self._ceiling.submit(self._way)

    def end(self, copy: torch.cuda.Event) -> torch.cuda.Event:
        return copy

    def copy(self, count: int) -> None:
        self._ceiling.copy(self._way, count)


class Window:
    """One window of a victim's work, alone or with copies from its start on."""

    def __init__(self, victim: Victim, load: Load) -> None:
        self.size = load.size
        self._victim, self._load = victim, load
        self._watch = torch.cuda.Stream()
        self.copied: list[float] = []  # seconds in which copies ran, of each window with copies
        count = max(4, int(0.2 * GB / load.size))
        seconds = median_seconds(lambda: load.copy(count), 3) / count
        self.copies = max(1, int(0.8 * self.run(0) / seconds))
        self.run(self.copies)
        self.copied.clear()

    def alone(self) -> float:
        return self.run(0)

    def loaded(self) -> float:
        return self.run(self.copies)

    def run(self, count: int) -> float:
        """Seconds of the victim's work. Submissions are interleaved, so that neither queue starves: a copy is submitted
        while work of `lead` is queued, or the victim would wait for the submission and not for the copy."""
        torch.cuda.synchronize()
        time.sleep(REST_S)
        begin, end, copies_end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        begin.record()
        fence = self._load.fence()  # before the victim's work: the copies do not wait for it
        begun: list[Any] = []
        times, lead = self._victim.times, self._victim.lead
        for i in range(times):
            self._victim.work()
            while len(begun) < count * (i + 1 - lead) / (times - lead):
                begun.append(self._load.submit(fence))
        end.record()
        if begun:
            self._watch.wait_event(self._load.end(begun[-1]))
            copies_end.record(self._watch)
        torch.cuda.synchronize()
        if begun:
            self.copied.append(float(begin.elapsed_time(copies_end)) / 1e3)
        return float(begin.elapsed_time(end)) / 1e3


def row(name: str, window: Window, quadruples: int, judge: Callable[[float, float], tuple[Check, ...]]) -> Row:
    """What the pairs say, for the time in which copies ran and for 184 MB of them; `judge` gets the two figures."""
    found: Paired = paired(window.alone, window.loaded, quadruples)
    copied, busy = statistics.median(window.copied), found.alone + found.added
    both = min(copied, busy)  # seconds; copies that last longer than the victim's work disturb nobody
    size = window.copies * window.size
    slower, stolen = 100 * found.added / both, found.added * CHUNK_BYTES / (size * both / copied) * US
    values: dict[str, Any] = {
        "slower %": slower,
        "noise %": 100 * found.noise / both,
        "stolen us per 184 MB": stolen,
        "noise us per 184 MB": found.noise * CHUNK_BYTES / (size * both / copied) * US,
        "GB/s meanwhile": size / copied / GB,
        "copying % of the time": 100 * copied / busy,
        "alone ms": found.alone * MS,
        "spread alone %": 100 * found.spread,
    }
    return Row(name, values, judge(slower, stolen))


def unjudged(slower: float, stolen: float) -> tuple[Check, ...]:
    return ()


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
        " pause (H straight, A staged), and the GPU time that 184 MB of copies take from them. Plain: contiguous copies"
        " of 184 MB and nothing else, what any connector takes. Runs with and without"
        " copies in the order ABBA; noise is the standard error of the result."
    )

    def can_run(self) -> str | None:
        return no_gpu(2 << 30)

    def run(self, quick: bool) -> Iterator[Row]:
        quadruples = 4 if quick else 16
        kind, device = best_device()
        work = victims()
        for geometry, objects in ((hybrid(), 4), (attention(), 8)):
            with copies(Pages(geometry, objects), device) as made:
                for victim, way in itertools.product(work, WAYS):
                    for checked in (True, False):
                        name = f"{geometry.name} {way} ({kind}), {victim.name}{'' if checked else ', no checksum'}"
                        judge = functools.partial(limits, victim.name, geometry.name) if checked else unjudged
                        yield row(name, Window(victim, Objects(made, way, checked=checked)), quadruples, judge)
                    if geometry.name == "H":
                        floor = Window(victim, Plain(CHUNK_BYTES, way))
                        yield row(f"plain {way}, {victim.name}", floor, quadruples, unjudged)
                made.verify()
            torch.cuda.empty_cache()
