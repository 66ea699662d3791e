"""Behaviours as values."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import TypeVar

from lmcache_mp_safe.testing.conformance.bench import Bench

Run = Callable[[Bench], Iterator[float] | None]
R = TypeVar("R", bound=Run)
_FLAVOUR = "_conformance_flavour"


class Flavour(enum.Enum):
    """The kind of server that a behaviour needs. All have a pool of `subjects.POOL_BYTES`."""

    PLAIN = "plain"
    SHORT = "short locks"  # write and read locks run out after `subjects.LOCK_S`
    SLOW = "slow lookups"  # what is not in memory takes `subjects.LOOKUP_S` or more to be looked up
    PATIENT = "patience"  # silences and sessions end; nothing clears the pool while behaviours wait


@dataclass(frozen=True)
class Behaviour:
    """One sentence about the server.

    Attributes:
        run: fails where it is not true. If it yields, it wants to be gone on with after so many seconds.
    """

    name: str
    flavour: Flavour
    run: Run

    def steps(self, bench: Bench) -> Iterator[float]:
        """Carry it out; each item is a number of seconds to let pass."""
        yield from self.run(bench) or ()


def behaviour(flavour: Flavour = Flavour.PLAIN) -> Callable[[R], R]:
    """Marks a function of the module as a behaviour."""

    def mark(run: R) -> R:
        setattr(run, _FLAVOUR, flavour)
        return run

    return mark


def behaviours_of(module: ModuleType) -> list[Behaviour]:
    """The marked functions of a module, in its order."""
    return [
        Behaviour(name, getattr(run, _FLAVOUR), run)
        for name, run in vars(module).items()
        if inspect.isfunction(run) and hasattr(run, _FLAVOUR) and run.__module__ == module.__name__
    ]
