"""What a store consists of while it is under way: plain records, moved on by `stores.py`.

A *run* is one reservation on the server: consecutive chunk objects of one request, or the pieces of one boundary
object. It lives through

    RESERVING -> RESERVED -> COPYING -> COMMITTING        (certified and pinned from the first to the end of COPYING)
    LOCATING  -> RESERVED -> COPYING                      (an object that is resident but wrong is mended in place)

and ends acknowledged or failed.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field

from lmcache_mp_safe.ids import JobId
from lmcache_mp_safe.scheduler.certify import Certificate
from lmcache_mp_safe.scheduler.known import Known
from lmcache_mp_safe.scheduler.objects import ObjectName
from lmcache_mp_safe.scheduler.progress import Prefix
from lmcache_mp_safe.wire import CallId, SessionId


class RunState(enum.Enum):
    RESERVING = "reserving"
    LOCATING = "locating"  # repair: lookup, then retrieve, to learn the slots of the resident object
    RESERVED = "reserved"
    COPYING = "copying"
    COMMITTING = "committing"


@dataclass
class Item:
    """One object of a run.

    Attributes:
        mark: chunk index, or boundary.
        certificate: pinned while `pinned`.
    """

    mark: int
    name: ObjectName
    certificate: Certificate
    pinned: bool = True
    slots: tuple[int, ...] = ()


@dataclass
class Run:
    """One reservation and the objects in it.

    Attributes:
        plan_number: the plan in which its blocks were pinned.
        call: the reservation, then its commit. reservation: the call that asked for the slots.
        failed: it will not be committed. copy_failed: a copy into its slots did.
    """

    prefix: Prefix
    items: list[Item]
    is_boundary: bool
    plan_number: int
    session: SessionId
    state: RunState = RunState.RESERVING
    is_repair: bool = False
    call: CallId | None = None
    reservation: CallId | None = None
    lease_until: float = 0.0
    jobs: dict[JobId, int] = field(default_factory=dict)  # running job -> index in items
    failed: bool = False
    copy_failed: bool = False

    @property
    def span(self) -> tuple[int, int]:
        """Objects [start, end) of the session's sequence that the run covers."""
        if self.is_boundary:
            return 0, len(self.items[0].name.pieces)
        return self.items[0].mark, self.items[-1].mark + 1

    @property
    def sealed(self) -> bool:
        """Whether every object is complete, once no job runs."""
        return self.state in (RunState.COPYING, RunState.COMMITTING) and not self.failed

    @property
    def awaits_copy(self) -> bool:
        """Whether no worker reads its blocks yet."""
        return self.state in (RunState.RESERVING, RunState.LOCATING, RunState.RESERVED)

    @property
    def holds_alone(self) -> bool:
        """Whether one of its pinned blocks has no other owner."""
        return any(block.ref_cnt == 1 for item in self.items if item.pinned for block in item.certificate.blocks)


@dataclass
class Question:
    """A lookup that tells whether objects without a slot are stored already."""

    run: Run
    items: list[Item]
    session: SessionId


def split_repairs(items: list[Item], known: Known, most: int) -> Iterator[list[Item]]:
    """Runs of at most so many ordinary objects, and each object to be mended in a run of its own."""
    ordinary = [item for item in items if item.name.digest not in known.poisoned]
    for start in range(0, len(ordinary), most):
        yield ordinary[start : start + most]
    for item in items:
        if item.name.digest in known.poisoned:
            yield [item]
