"""Jobs under way: their copies, and whether they have failed already."""

from __future__ import annotations

import enum
from collections.abc import Sequence
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


class Batch:
    """One plan's stores, or its loads.

    The engine's hook has time to make this and no more: what each job needs while it runs is made by the first who
    asks, mostly the copy thread.

    Attributes:
        jobs: at least one.
        pool: stays mapped while any of them runs.
        started: when the plan arrived.
        left: jobs that have not been reported; the engine's thread counts.
        lock: the copy thread holds it while it submits one of them.
    """

    def __init__(self, jobs: Sequence[StoreJob | LoadJob], pool: MappedPool, started: float) -> None:
        self.jobs = jobs
        self.pool = pool
        self.started = started
        self.left = len(jobs)
        self.lock = Lock()
        self._running: list[Running] = []

    def running(self) -> list[Running]:
        """The jobs, in order. Any thread may ask; not while it holds the lock."""
        with self.lock:
            if not self._running:
                self._running = [Running(job, self) for job in self.jobs]
            return self._running


class Running(msgspec.Struct, eq=False):
    """One job. A dataclass would take four times as long to make.

    Attributes:
        copy: None before it is queued, and once it is over.
        submitted: whatever was to be queued has been. Changes once, under the batch's lock.
        failure: why the job will end as failed, once it is over.
        bad_seals: indices of a load's objects whose slot does not hold what was promised.
    """

    job: StoreJob | LoadJob
    batch: Batch
    copy: Copy | None = None
    submitted: bool = False
    failure: str | None = None
    bad_seals: tuple[int, ...] = ()

    @property
    def pool(self) -> MappedPool:
        return self.batch.pool

    @property
    def lock(self) -> Lock:
        return self.batch.lock

    @property
    def over(self) -> bool:
        """Nothing of the job reads or writes any more.

        Raises:
            Exception: the device is lost, and with it the copy.
        """
        return self.submitted and (self.copy is None or self.copy.completion.done())
