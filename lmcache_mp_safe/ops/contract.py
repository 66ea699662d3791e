"""What a device has to offer.

Order on a device is made by fences and completions. A *fence* is recorded on the compute stream: everything that was
queued there before is done once it has passed. A *completion* belongs to one copy, which runs on a stream of its own
after its fence. On a CPU, where everything runs inline, both are passed as soon as they exist.

Memory: a backend reads and writes buffers and slots until a copy's completion is done; whoever gave them keeps them
alive and unchanged until then.

Failures: of a copy that raises nothing is under way. One that fails later is *done*, too, and its checksums raise.

Checksums: that of `geometry/checksum.py` over each piece's payload.

Threads: fences, `hold_compute` and everything that only asks belong to the thread that runs the model. Copies are
submitted by one thread at a time, which may be another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lmcache_mp_safe.geometry.spans import Spans

Bytes = NDArray[np.uint8]


class Fence(Protocol):
    """A mark on the compute stream."""

    def passed(self) -> bool:
        """Whether all work queued before the mark is done.

        Raises:
            LocalError: the fence was never recorded; CUDA would call such an event done.
        """


class Completion(Protocol):
    """The end of one copy."""

    def done(self) -> bool:
        """Whether the copy is over, well or not: nothing of it is read or written any more."""

    @property
    def checksums(self) -> tuple[int, ...]:
        """Checksum of the payload of each piece, in order; only once done. 0 for a piece that is not wanted, and for
        all pieces where none was asked for.

        Of a copy out: of the bytes in the pages, which the slots must then hold. Taken from the slots it would vouch
        for whatever another writer of the slot puts there in between. Of a copy in: of the bytes that arrived in the
        pages (of pages that were not wanted, of those in the slot).

        Raises:
            Exception: the copy failed.
        """


class SlotMemory(Protocol):
    """A mapped pool, as the backend prepares it for copies."""

    def make_ready(self, offset: int, size: int) -> None:
        """Prepare these bytes, which must have memory behind them. Takes milliseconds the first time, nothing later.

        Never raises: where they cannot be prepared, copies are slower.
        """

    def release(self) -> None:
        """Undo it all. No copy may be under way any more."""


class Backend(Protocol):
    """Copies between the KV cache of one rank and slots of the server's pool."""

    name: str
    why: str

    def record_fence(self) -> Fence:
        """A fence behind everything that is queued on the compute stream by now."""

    def adopt(self, memory: Bytes) -> SlotMemory:
        """Memory that slots will be views of."""

    def copy_out(self, spans: Spans, slots: Sequence[Bytes | None], after: Fence) -> Completion:
        """Pages into slots, once the fence has passed. `slots[i]` is piece i; None: that piece is not wanted.

        Raises:
            Exception: nothing is under way.
        """

    def copy_in(self, spans: Spans, slots: Sequence[Bytes], after: Fence, *, checked: bool) -> Completion:
        """Slots into pages, once the fence has passed; with checksums if `checked`.

        Raises:
            Exception: nothing is under way.
        """

    def hold_compute(self, until: Completion) -> None:
        """Make the compute stream wait for a copy before anything that is queued there later."""

    def drain(self) -> None:
        """Wait on the host until every copy is over. For shutdown only: a hook never waits."""
