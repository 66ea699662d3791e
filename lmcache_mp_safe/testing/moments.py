"""Stops the world at a named moment of a request, on a real engine: what happens there is a test's to say.

    with at(engine, Moment.LOAD, server.kill) as seen:
        engine.generate([prompt], 12)
    assert seen.happened

The engine has to be in this process. What is done at a moment is done in the engine's thread, between two of its own
actions, once: the first time that the moment comes.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from lmcache_mp_safe.scheduler.phases import Validated
from lmcache_mp_safe.testing.engine import Engine


class Moment(enum.StrEnum):
    """In the order in which a request comes by, stores first: a prefix is stored before it is hit."""

    COPY = "copy"  # slots are granted; the copies into them are about to begin
    COMMIT = "commit"  # everything is copied and sealed; the commit has just been sent
    LOOKUP = "lookup"  # the lookup has just been sent
    FOUND = "found"  # counted and locked; slots are about to be asked for
    HOLD = "hold"  # promised: seals checked, locks held, not yet admitted
    LOAD = "load"  # admitted; the copies out of the slots are about to begin

    @property
    def is_of_a_hit(self) -> bool:
        """Whether only a request with a hit comes by."""
        return self not in (Moment.COPY, Moment.COMMIT, Moment.LOOKUP)


@dataclass
class Seen:
    happened: bool = False


@dataclass(frozen=True)
class _Point:
    """A method of one object, and which of its calls are the moment. `before`: act before the call, not behind it."""

    owner: Any
    method: str
    before: bool
    counts: Callable[..., bool] = lambda *_, **__: True


@contextmanager
def at(engine: Engine, moment: Moment, act: Callable[[], None]) -> Iterator[Seen]:
    """Have `act` done when the moment comes."""
    seen, point = Seen(), _point(engine, moment)
    original = getattr(point.owner, point.method)

    def watched(*arguments: Any, **options: Any) -> Any:
        comes = not seen.happened and point.counts(*arguments, **options)
        seen.happened |= comes
        if comes and point.before:
            act()
        result = original(*arguments, **options)
        if comes and not point.before:
            act()
        return result

    setattr(point.owner, point.method, watched)
    try:
        yield seen
    finally:
        delattr(point.owner, point.method)  # the class's own comes back


def _point(engine: Engine, moment: Moment) -> _Point:
    live = engine.connector.scheduler_half._live
    worker = engine.worker_connector.worker_half
    match moment:
        case Moment.COPY:
            return _Point(worker, "begin_step", before=True, counts=lambda plan: bool(plan.stores))
        case Moment.COMMIT:
            return _Point(live.wire, "commit", before=False)
        case Moment.LOOKUP:
            return _Point(live.wire, "lookup", before=False)
        case Moment.FOUND:
            return _Point(live.wire, "retrieve", before=True)
        case Moment.HOLD:
            return _Point(live.hits, "_apply", before=False, counts=lambda _, event, *__: isinstance(event, Validated))
        case Moment.LOAD:
            return _Point(worker, "begin_step", before=True, counts=lambda plan: any(job.objects for job in plan.loads))
