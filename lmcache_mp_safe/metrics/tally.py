"""Counting, free of clocks and locks: a half counts as it goes, and what is new is taken once a step."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec


class Totals(dict[str, float]):
    """Sums since the start; 0 for what was never counted."""

    def __missing__(self, key: str) -> float:
        return 0


class Sample(msgspec.Struct, frozen=True):
    """What is new since the last one.

    Attributes:
        sums: what to add, by key.
        times: observations in seconds, by key.
        levels: what is so now, by key.
    """

    sums: Mapping[str, float] = {}
    times: Mapping[str, list[float]] = {}
    levels: Mapping[str, float] = {}

    def merged(self, later: Sample) -> Sample:
        """This one and a later one, or one of another rank, as one."""
        sums, times = dict(self.sums), dict(self.times)
        for key, amount in later.sums.items():
            sums[key] = sums.get(key, 0) + amount
        for key, observed in later.times.items():
            times[key] = [*times.get(key, ()), *observed]
        return Sample(sums, times, {**self.levels, **later.levels})


class Tally:
    """What one half has counted.

    Attributes:
        totals: since the start; for tests and for whoever looks from inside of the process.
    """

    def __init__(self) -> None:
        self.totals = Totals()
        self._sums = Totals()
        self._times: dict[str, list[float]] = {}
        self._levels: Mapping[str, float] = {}

    def add(self, key: StrEnum, amount: float = 1) -> None:
        self.totals[key] += amount
        self._sums[key] += amount

    def observe(self, key: StrEnum, seconds: float) -> None:
        self._times.setdefault(key, []).append(seconds)

    def take(self, levels: Mapping[str, float]) -> Sample | None:
        """What is new; None if nothing is.

        Args:
            levels: what is so now.
        """
        if not self._sums and not self._times and levels == self._levels:
            return None
        sample = Sample(self._sums, self._times, levels)
        self._sums, self._times, self._levels = Totals(), {}, levels
        return sample
