"""What a device has to offer.

Order on a device is made by fences and completions. A *fence* is recorded on the compute stream: everything that was
queued there before is done once it has passed. A *completion* belongs to one copy, which runs on a stream of its own
after its fence. On a CPU, where everything runs inline, both are passed as soon as they exist.

Memory: a backend reads and writes buffers and slots until a copy's completion is done; whoever gave them keeps them
alive and unchanged until then.

Failures: a copy that raises has queued nothing. One that fails later is *done*, too, and its checksums raise.

Checksums: which algorithm it is, the seal's version names (`geometry/seal.py`): today XXH3-64 over a piece's payload in
order. One that a device computes in parallel would be another version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lmcache_mp_safe.geometry.spans import Span

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
        """Checksum of the payload of each piece, in order; only once done.

        Of a copy out: of the bytes in the pages, which the slots must then hold. Taken from the slots it would vouch
        for whatever another writer of the slot puts there in between. Of a copy in: of the bytes that arrived in the
        pages (of pages that were not wanted, of those in the slot).

        Raises:
            Exception: the copy failed.
        """


class Backend(Protocol):
    """Copies between the KV cache of one rank and slots of the server's pool."""

    name: str
    why: str

    def record_fence(self) -> Fence:
        """A fence behind everything that is queued on the compute stream by now."""

    def copy_out(self, spans: Sequence[Span], slots: Sequence[Bytes | None], after: Fence) -> Completion:
        """Pages into slots, once the fence has passed. `slots[i]` is piece i; None: that piece is not wanted.

        Raises:
            Exception: nothing was queued.
        """

    def copy_in(self, spans: Sequence[Span], slots: Sequence[Bytes], after: Fence) -> Completion:
        """Slots into pages, once the fence has passed.

        Raises:
            Exception: nothing was queued.
        """

    def hold_compute(self, until: Completion) -> None:
        """Make the compute stream wait for a copy before anything that is queued there later."""

    def drain(self) -> None:
        """Wait on the host until every copy is over. For shutdown only: a hook never waits."""
