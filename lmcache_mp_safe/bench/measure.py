"""Clocks: medians of repeats after warm-ups, and pairs for effects that are smaller than a machine's drift."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

GB = 1e9
US = 1e6
MS = 1e3


def seconds_of(work: Callable[[], object], repeats: int, warmups: int = 1) -> list[float]:
    """Wall-clock seconds of each repeat. The work must be over when the call returns."""
    times = []
    for repeat in range(warmups + repeats):
        begin = time.perf_counter()
        work()
        if repeat >= warmups:
            times.append(time.perf_counter() - begin)
    return times


def median_seconds(work: Callable[[], object], repeats: int, warmups: int = 1) -> float:
    return statistics.median(seconds_of(work, repeats, warmups))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


@dataclass(frozen=True)
class Paired:
    """What a load costs a victim, of runs with and without it in turn.

    Attributes:
        alone: median seconds of the victim's work without the load.
        added: median of the seconds that the load adds, over quadruples without, with, with, without.
        noise: standard error of `added`, in seconds.
        spread: standard deviation of the runs without, as a share of `alone`.
    """

    alone: float
    added: float
    noise: float
    spread: float


def paired(alone: Callable[[], float], loaded: Callable[[], float], quadruples: int) -> Paired:
    """Runs in the order ABBA, so that a drift of the clock rate cancels out of each quadruple."""
    without: list[float] = []
    added: list[float] = []
    for _ in range(quadruples):
        first, busy, again, last = alone(), loaded(), loaded(), alone()
        without += [first, last]
        added.append((busy + again - first - last) / 2)
    return summary(without, added)


def summary(without: Sequence[float], added: Sequence[float]) -> Paired:
    base = statistics.median(without)
    spread = statistics.stdev(without) / base if len(without) > 1 else 0.0
    return Paired(base, *median_and_noise(added), spread)


def median_and_noise(values: Sequence[float]) -> tuple[float, float]:
    """The median and its standard error, the latter as of a normal distribution with this median deviation."""
    middle = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(one - middle) for one in values)
    return middle, 1.2533 * deviation / len(values) ** 0.5


@dataclass
class Times:
    """Seconds of a store, the lookup of what it stored and the load of that, of each repeat."""

    store: list[float] = field(default_factory=list)
    lookup: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
