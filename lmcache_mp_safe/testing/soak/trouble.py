"""What happens to the server during a soak: it is killed and comes back, or stands still for a while."""

from __future__ import annotations

import random
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from lmcache_mp_safe.testing.server import LMCacheServer


@dataclass(frozen=True)
class Pace:
    """How often. Times in seconds.

    Attributes:
        gap_s: between two troubles, at random.
        away_s: how long a killed server stays away, besides its own start.
        frozen_s: how long one stands still: from a hiccup to past every deadline.
        no_kills_after_s: from then on the server lives, so that its memory can be watched.
    """

    gap_s: tuple[float, float]
    no_kills_after_s: float
    away_s: tuple[float, float] = (0.0, 6.0)
    frozen_s: tuple[float, float] = (0.2, 8.0)


class Trouble:
    """Makes trouble on a thread of its own, while the engine goes on."""

    def __init__(self, server: LMCacheServer, pace: Pace, rng: random.Random, now: float) -> None:
        self._server, self._pace, self._rng = server, pace, rng
        self._began, self._next = now, now + rng.uniform(*pace.gap_s)
        self._thread = ThreadPoolExecutor(1, "trouble")
        self._running: Future[None] | None = None
        self.kills = self.freezes = 0
        self.server_started = now

    def poll(self, now: float) -> None:
        """Begin the next one when it is time.

        Raises:
            ServerError: the server did not come back from the last one.
        """
        if self._running is not None:
            if self._running.done():
                self._running.result()
                self._running, self._next = None, now + self._rng.uniform(*self._pace.gap_s)
        elif now >= self._next:
            may_kill = now - self._began < self._pace.no_kills_after_s
            act = self._rng.choice([self._kill, self._kill, self._freeze]) if may_kill else self._freeze
            self._running = self._thread.submit(act)

    @property
    def server_is_well(self) -> bool:
        return self._running is None

    def end(self) -> None:
        """Wait until the server is well. Raises as `poll`."""
        self._thread.shutdown(wait=True)
        if self._running is not None:
            self._running.result()
            self._running = None

    def _kill(self) -> None:
        self.kills += 1
        self._server.kill()
        time.sleep(self._rng.uniform(*self._pace.away_s))
        if self._rng.random() < 0.5:
            self._server.rename()
        self._server.start()
        self.server_started = time.monotonic()

    def _freeze(self) -> None:
        self.freezes += 1
        self._server.pause()
        time.sleep(self._rng.uniform(*self._pace.frozen_s))
        self._server.resume()
