"""What this package takes for granted about others, each assumption by name, for stand-in and real thing alike.

A behaviour of the LMCache server is a function whose name is a sentence and whose body fails where the sentence is not
true. `SERVER_BEHAVIOURS` are all of them. `tests/conformance` runs them against `testing/fake_server` and against the
stock server, so that the fake cannot lie and a newer LMCache that behaves otherwise is noticed by name.

 behaviours.py  what a behaviour is
 bench.py       one client's view of a server, the same for both
 subjects.py    the two servers, each in the flavours that behaviours ask for
 sequences.py, stores.py, room.py, loads.py, life.py    the behaviours
 blocks.py      the same for vLLM's block pool and its stand-in
"""

from __future__ import annotations

from lmcache_mp_safe.testing.conformance import life, loads, room, sequences, stores
from lmcache_mp_safe.testing.conformance.behaviours import Behaviour, Flavour, behaviours_of

SERVER_BEHAVIOURS: tuple[Behaviour, ...] = tuple(
    one for module in (sequences, stores, room, loads, life) for one in behaviours_of(module)
)

__all__ = ["SERVER_BEHAVIOURS", "Behaviour", "Flavour"]
