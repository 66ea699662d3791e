"""The life of a request as far as hits are concerned: phases, events, and the one table of moves.

docs/architecture.md draws the table; a test regenerates the drawing and compares. Stores have a life of their own
(`stores.py`), because they outlive the request.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from lmcache_mp_safe.metrics.counts import Miss


class Phase(enum.Enum):
    NEW = "new"  # nothing asked yet
    LOOKING_UP = "looking up"  # the server counts the chunk objects of the prefix
    PROBING = "probing"  # the server is asked for boundary objects, best resume points first
    HOLDING = "holding"  # locks held; slots asked for, seals about to be checked
    PROMISED = "promised"  # a hit was answered to vLLM, every seal checked, locks held
    LOADING = "loading"  # the workers copy; blocks and locks stay held until every rank has answered
    MISSED = "missed"  # nothing to load: answered as such until vLLM admits the request
    COMPUTING = "computing"  # admitted
    ENDED = "ended"


class Event:
    """Something that happened to one request."""


@dataclass(frozen=True)
class Polled(Event):
    """vLLM asks what can be loaded beyond `local_tokens` of its own prefix cache."""

    local_tokens: int


@dataclass(frozen=True)
class ChunksCounted(Event):
    """The first `found` chunk objects of the prefix exist; read locks on them are held."""

    found: int


@dataclass(frozen=True)
class Probed(Event):
    """The server has (or has not) every piece of the boundary object."""

    boundary: int
    exists: bool


@dataclass(frozen=True)
class Validated(Event):
    """Slots of everything a resume at the boundary needs are known, and every seal in them is right."""


@dataclass(frozen=True)
class Unusable(Event):
    """The lookup, a slot or a seal failed, was late, or the server is away: a miss."""

    why: Miss


@dataclass(frozen=True)
class Admitted(Event):
    """vLLM allocated blocks and wants exactly the promised tokens loaded."""


@dataclass(frozen=True)
class AdmittedWithoutLoad(Event):
    """vLLM allocated blocks and wants nothing loaded: another connector won, or there was nothing."""


@dataclass(frozen=True)
class AdmittedOtherwise(Event):
    """vLLM wants a number of tokens loaded that was not promised; that load can only be reported as failed."""


@dataclass(frozen=True)
class Loaded(Event):
    """Every rank answered: all bytes arrived and are right."""


@dataclass(frozen=True)
class LoadFailed(Event):
    """Every rank answered, and at least one share did not arrive or is wrong."""


@dataclass(frozen=True)
class Expired(Event):
    """The promise is older than its lease; the server may take the locks back."""


@dataclass(frozen=True)
class Finished(Event):
    """vLLM finished or aborted the request."""


@dataclass(frozen=True)
class EpochEnded(Event):
    """The server this request's locks belonged to is gone; there is nothing to release."""


_WAITING = (Phase.LOOKING_UP, Phase.PROBING, Phase.HOLDING)
_LIVE = tuple(phase for phase in Phase if phase is not Phase.ENDED)

# A value is every phase the event may lead to. Which of them is decided in `machine.py`; anything else is a bug there.
_TARGETS: dict[tuple[Phase, type[Event]], tuple[Phase, ...]] = {
    # The first question starts the lookup. A prompt too short for a hit, a bypass or an earlier failed load: miss.
    (Phase.NEW, Polled): (Phase.LOOKING_UP, Phase.PROBING, Phase.MISSED),
    (Phase.LOOKING_UP, Polled): (Phase.LOOKING_UP,),
    (Phase.PROBING, Polled): (Phase.PROBING,),
    (Phase.HOLDING, Polled): (Phase.HOLDING,),
    (Phase.MISSED, Polled): (Phase.MISSED,),
    # vLLM's own cache may have caught up (miss), or lost blocks below the promise (start again).
    (Phase.PROMISED, Polled): (Phase.PROMISED, Phase.MISSED, Phase.LOOKING_UP, Phase.PROBING),
    # Asked again while computing: the request was preempted.
    (Phase.COMPUTING, Polled): (Phase.LOOKING_UP, Phase.PROBING, Phase.MISSED),
    (Phase.LOOKING_UP, ChunksCounted): (Phase.PROBING, Phase.HOLDING, Phase.MISSED),
    (Phase.PROBING, Probed): (Phase.PROBING, Phase.HOLDING, Phase.MISSED),
    (Phase.HOLDING, Validated): (Phase.PROMISED,),
    **{(phase, Unusable): (Phase.MISSED,) for phase in (*_WAITING, Phase.PROMISED)},
    (Phase.PROMISED, Expired): (Phase.NEW,),
    (Phase.PROMISED, Admitted): (Phase.LOADING,),
    # A second call with 0 after a load, and every admission without a hit.
    **{(phase, AdmittedWithoutLoad): (Phase.COMPUTING,) for phase in _LIVE if phase is not Phase.LOADING},
    **{(phase, AdmittedOtherwise): (Phase.LOADING,) for phase in _LIVE if phase is not Phase.LOADING},
    (Phase.LOADING, Loaded): (Phase.COMPUTING,),
    (Phase.LOADING, LoadFailed): (Phase.MISSED,),
    **{(phase, EpochEnded): (Phase.MISSED,) for phase in (*_WAITING, Phase.PROMISED)},
    # Workers still answer for the load; only its locks are gone.
    **{(phase, EpochEnded): (phase,) for phase in (Phase.NEW, Phase.LOADING, Phase.MISSED, Phase.COMPUTING)},
    **{(phase, Finished): (Phase.ENDED,) for phase in _LIVE},
}

MOVES: Mapping[tuple[Phase, type[Event]], frozenset[Phase]] = {
    key: frozenset(targets) for key, targets in _TARGETS.items()
}
