"""A job under way: its copies, and whether it has failed already."""

from __future__ import annotations

from dataclasses import dataclass, field

from lmcache_mp_safe.contract import LoadJob, ObjectCopy, StoreJob
from lmcache_mp_safe.geometry.seal import Seal
from lmcache_mp_safe.ops.contract import Bytes, Completion
from lmcache_mp_safe.worker.pool import MappedPool


@dataclass(eq=False)
class Copy:
    """One object's copy, queued.

    Attributes:
        slices: this rank's slice of each piece; None for a piece that is not stored.
        seals: those found in the slices, when it is a load.
    """

    object: ObjectCopy
    slices: list[Bytes | None]
    completion: Completion
    seals: list[Seal] = field(default_factory=list)


@dataclass(eq=False)
class Running:
    """One job.

    Attributes:
        pool: stays mapped while this job runs.
        copies: those that were queued. A job that failed half-way is over only when they are.
        failure: why the job will end as failed, once it is over.
    """

    job: StoreJob | LoadJob
    pool: MappedPool
    copies: list[Copy] = field(default_factory=list)
    failure: str | None = None

    @property
    def over(self) -> bool:
        """Nothing of the job reads or writes any more."""
        return all(copy.completion.done() for copy in self.copies)
