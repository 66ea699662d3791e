"""Locks as the server has them: anonymous counts that run out together."""

from __future__ import annotations

import math
from collections.abc import Callable

Clock = Callable[[], float]


class TtlLock:
    """A count of holders with one time for all of them.

    Every `lock` renews the time. Once it has run out the lock is free whatever the count, and the next `lock` counts
    from one. Nobody is known by name, so a release too many takes somebody else's.
    """

    def __init__(self, clock: Clock, ttl_s: float) -> None:
        self._clock = clock
        self._ttl_s = ttl_s
        self._until = -math.inf
        self._count = 0

    @property
    def count(self) -> int:
        """Holders whose time has not run out."""
        return self._count if self._clock() < self._until else 0

    def lock(self, times: int = 1) -> None:
        self._count = self.count + times
        self._until = self._clock() + self._ttl_s

    def unlock(self, times: int = 1) -> None:
        self._count = max(0, self._count - times)
