"""How long a thread computes before CPython lets another one have the interpreter: 5 ms, and less while somebody waits.

An engine that has nothing to do but to wait for the server asks again and again. Each message passes through a thread
of LMCache's client, and each copy through the copy thread; whenever such a thread wants the interpreter it waits for a
whole turn. A hit of six chunks took 150 ms to be found this way, and takes 20 ms with short turns.

They must be shorter than what the engine computes between two calls that give the interpreter away by themselves, some
hundred microseconds: each of those calls starts the waiting thread's turn anew, and mostly the engine is first to take
the interpreter back. With 200 us a load of 31 objects waited 0.1 to 5.6 s for its 30 ms of computing, with 20 us never
more than 30 ms (docs/gpu.md).
"""

from __future__ import annotations

import sys
from typing import ClassVar
from weakref import WeakSet

_SHORT_S = 20e-6


class ShortTurns:
    """One party's wish for short turns in this process. Any number of parties may have one, on any thread."""

    _parties: ClassVar[WeakSet[ShortTurns]] = WeakSet()
    _usual_s: ClassVar[float] = sys.getswitchinterval()

    def __init__(self) -> None:
        self.wanted = False
        ShortTurns._parties.add(self)

    def want(self, wanted: bool) -> None:
        """Cheap enough for each step. It takes no lock: whoever ends short turns looks again afterwards, so a wish that
        came meanwhile is not lost."""
        if wanted == self.wanted:
            return
        self.wanted = wanted
        if wanted:
            self._shorten()
        elif not self._anybody():
            sys.setswitchinterval(ShortTurns._usual_s)
            if self._anybody():
                self._shorten()

    @staticmethod
    def _anybody() -> bool:
        return any(party.wanted for party in list(ShortTurns._parties))

    @staticmethod
    def _shorten() -> None:
        if sys.getswitchinterval() > _SHORT_S:
            sys.setswitchinterval(_SHORT_S)
