"""How the memory of a process develops: samples of its life, and how much it has grown since it was warm. Pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field


@dataclass
class Growth:
    """Memory of one process's lives: a server that restarts begins another.

    Attributes:
        warm_s: age from which a life's samples count.
        lives: per life, pairs of age in seconds and bytes.
    """

    warm_s: float
    lives: list[list[tuple[float, int]]] = field(default_factory=list)

    def begin(self) -> None:
        self.lives.append([])

    def add(self, age_s: float, size: int) -> None:
        self.lives[-1].append((age_s, size))

    @property
    def grown_bytes(self) -> int | None:
        """The most that a life has grown, from the median of the first third of its warm samples to that of the last;
        None if no life was long enough to tell."""
        grown = []
        for life in self.lives:
            sizes = [size for age, size in life if age >= self.warm_s]
            third = len(sizes) // 3
            if third:
                grown.append(int(statistics.median(sizes[-third:]) - statistics.median(sizes[:third])))
        return max(grown, default=None)

    @property
    def most_bytes(self) -> int:
        return max((size for life in self.lives for _, size in life), default=0)
