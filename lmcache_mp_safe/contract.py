"""What crosses between the scheduler process and the workers. Frozen, plain and picklable.

The scheduler decides and the workers act: a `StepPlan` goes out with every engine step, a `StepReport` comes back with
some later one. Workers never talk to the LMCache server; everything they need about it is in the plan.
"""

from __future__ import annotations

import enum
from pathlib import Path

import msgspec

from lmcache_mp_safe.ids import JobId, RequestId, ServerEpoch

SHARED_MEMORY = Path("/dev/shm")  # where Linux keeps POSIX shared memory

# In `ObjectCopy.blocks` of a load: this page of the object is not wanted (it is in the prefix cache already). Its bytes
# still count for the checksum; they are read from the slot.
SKIP = -1


class Integrity(enum.Enum):
    """What is checked before loaded bytes are used."""

    OFF = "off"  # nothing; for measurements only
    SEAL = "seal"  # the object in the slot is the promised one and was completed by its writer
    CHECKSUM = "checksum"  # and the bytes that arrived in the pages are the ones that were sealed


class PoolSegment(msgspec.Struct, frozen=True):
    """The server's shared-memory pool as one epoch sees it.

    Attributes:
        epoch: grows by one each time the server restarted or was replaced. A job of another epoch must not be touched.
        name: POSIX shared-memory name; a leading slash is optional.
        size: bytes.
        inode: inode of the segment that the scheduler proved to be its server's; workers must map the same one.
        slices: (offset, size) in bytes of each rank's slice within an object, by rank.
        namespace: of the model on the server; part of the seals.
    """

    epoch: ServerEpoch
    name: str
    size: int
    inode: int
    slices: tuple[tuple[int, int], ...] = ()
    namespace: str = ""


class ObjectCopy(msgspec.Struct, frozen=True):
    """One object of the server and the vLLM pages that it is copied from or to.

    Attributes:
        digest: 32 bytes that identify the content; part of the seal.
        blocks: block ids per KV cache group, in payload order; empty for a group that is not in this object.
        slots: byte offset in the pool of each piece; a chunk object has one piece. `SKIP` in a store: the server has
            that piece already.
    """

    digest: bytes
    blocks: tuple[tuple[int, ...], ...]
    slots: tuple[int, ...]


class StoreJob(msgspec.Struct, frozen=True):
    """Copy one object's pages into the pool, then seal it."""

    job_id: JobId
    epoch: ServerEpoch
    object: ObjectCopy


class LoadJob(msgspec.Struct, frozen=True):
    """Copy the objects of one request's external hit into its blocks, and check what arrived."""

    job_id: JobId
    epoch: ServerEpoch
    request_id: RequestId
    objects: tuple[ObjectCopy, ...]


class StepPlan(msgspec.Struct, frozen=True):
    """What the workers are to do in this engine step.

    Attributes:
        number: grows by one a plan.
        segment: the pool to use; None while the server is away.
        stores: jobs whose source blocks are pinned and were certified in an earlier plan.
        loads: jobs whose slots are locked and whose seals were checked.
        wait_for: store jobs in flight whose source block the owner may write again in this step; the compute stream
            waits for them before the forward.
    """

    number: int
    segment: PoolSegment | None = None
    stores: tuple[StoreJob, ...] = ()
    loads: tuple[LoadJob, ...] = ()
    wait_for: tuple[JobId, ...] = ()


class JobOutcome(enum.Enum):
    """How one rank's share of a job ended."""

    DONE = "done"
    COPY_FAILED = "copy failed"  # a store that was not sealed, or a load that did not arrive
    BAD_SEAL = "bad seal"  # load: the slot does not hold the promised object
    BAD_CHECKSUM = "bad checksum"  # load: what arrived is not what was sealed
    STALE_EPOCH = "stale epoch"  # the job named a pool that is gone; nothing was touched


class JobReport(msgspec.Struct, frozen=True):
    """One rank's terminal answer for one job.

    Attributes:
        bad_objects: indices into `LoadJob.objects` that failed their seal or checksum, so that they can be repaired.
    """

    job_id: JobId
    rank: int
    outcome: JobOutcome
    detail: str = ""
    bad_objects: tuple[int, ...] = ()


class StepReport(msgspec.Struct, frozen=True):
    """Everything the ranks have to say after a step. Reports of different ranks may arrive in different steps."""

    jobs: tuple[JobReport, ...] = ()
    # (rank, epoch, why): the rank cannot use this epoch's pool
    unusable: tuple[tuple[int, ServerEpoch, str], ...] = ()

    def merged(self, other: StepReport) -> StepReport:
        return StepReport(jobs=self.jobs + other.jobs, unusable=self.unusable + other.unusable)


class RankLayout(msgspec.Struct, frozen=True):
    """How one rank lays out its KV cache, sent once to the scheduler.

    Attributes:
        rank: global rank among those that share the request (pipeline stage major, tensor rank minor).
        group_page_bytes: bytes that this rank holds for one block of each KV cache group, all layers and segments of
            the group together; 0 where the rank has no layer of the group.
        digest: 16 bytes over everything that decides what those bytes mean on this rank (layer names, segment
            geometry, dtypes).
    """

    rank: int
    group_page_bytes: tuple[int, ...]
    digest: bytes
    backend: str = ""
