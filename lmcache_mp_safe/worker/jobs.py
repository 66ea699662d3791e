"""A job under way: its copy, and whether it has failed already."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from threading import Lock

import msgspec

from lmcache_mp_safe.contract import LoadJob, StoreJob
from lmcache_mp_safe.errors import LocalError
from lmcache_mp_safe.geometry.seal import Seal
from lmcache_mp_safe.ops.contract import Bytes, Completion
from lmcache_mp_safe.worker.pool import MappedPool


class UnderWay(enum.Enum):
    """What is being copied, by how much it matters when its end is noticed."""

    NOTHING = enum.auto()
    STORES = enum.auto()  # nobody waits
    LOADS = enum.auto()  # a request waits, whatever else there is


@dataclass(eq=False, slots=True)
class Copy:
    """A job's copy, queued.

    Attributes:
        slices: this rank's slice of each piece, object after object; None for a piece that is not stored.
        completion: of a copy that this one is part of.
        first: the job's first piece among the `total` ones of the completion.
        seals: those found in the slices, when it is a load.
    """

    slices: list[Bytes | None]
    completion: Completion
    first: int
    total: int
    seals: list[Seal] = field(default_factory=list)

    @property
    def checksums(self) -> tuple[int, ...]:
        """Of the job's pieces; see `Completion`.

        Raises:
            LocalError: the completion has not one for each piece.
        """
        found = self.completion.checksums
        if len(found) != self.total:
            raise LocalError(f"{len(found)} checksums of {self.total} pieces")
        return found[self.first : self.first + len(self.slices)]


class Running(msgspec.Struct, eq=False):
    """One job. Made in the engine's thread, for each of many stores: a dataclass would take four times as long.

    Attributes:
        pool: stays mapped while this job runs.
        copy: None before it is queued, and once it is over.
        lock: one for all jobs of a plan; the copy thread holds it while it submits one of them.
        started: when its plan arrived.
        submitted: whatever was to be queued has been. Changes once, under the lock.
        failure: why the job will end as failed, once it is over.
        bad_seals: indices of a load's objects whose slot does not hold what was promised.
    """

    job: StoreJob | LoadJob
    pool: MappedPool
    lock: Lock
    started: float = 0.0
    copy: Copy | None = None
    submitted: bool = False
    failure: str | None = None
    bad_seals: tuple[int, ...] = ()

    @property
    def over(self) -> bool:
        """Nothing of the job reads or writes any more.

        Raises:
            Exception: the device is lost, and with it the copy.
        """
        return self.submitted and (self.copy is None or self.copy.completion.done())
