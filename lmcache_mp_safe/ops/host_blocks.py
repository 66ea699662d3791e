"""Page-locked host memory in small blocks, for tables and digests.

The driver takes more than a millisecond to page-lock memory, however little, and lets nobody else in meanwhile (1.6 ms
on the machine of docs/gpu.md). So it is asked for slabs, and their blocks are used again and again.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lmcache_mp_safe.ops.device import Bytes, Words

_SLAB_BYTES = 4 << 20
_LEAST_BYTES = 4 << 10
_WORD_BYTES = 8


class HostBlock:
    """One block. Whoever holds it may use its words; it goes back when nobody does.

    The words are views of a slab and keep only that alive, so hold the block as long as the device may touch them.
    """

    def __init__(self, memory: Bytes, words: int, free: list[Bytes]) -> None:
        self.words: Words = memory.view(np.uint64)[:words]
        self._memory, self._free = memory, free

    def __del__(self) -> None:
        self._free.append(self._memory)


class HostBlocks:
    """Blocks of sizes that are powers of two. What was once allocated stays: at most twice what is in use at a time."""

    def __init__(self, allocate: Callable[[int], Bytes]) -> None:
        self._allocate = allocate
        self._free: dict[int, list[Bytes]] = {}

    def take(self, words: int) -> HostBlock:
        """A block of that many words, of any content.

        Raises:
            DeviceError: there is no memory for it.
        """
        size = max(_LEAST_BYTES, 1 << (words * _WORD_BYTES - 1).bit_length()) if words else _LEAST_BYTES
        free = self._free.setdefault(size, [])
        if not free:
            slab = self._allocate(max(_SLAB_BYTES, size))
            free += [slab[start : start + size] for start in range(0, len(slab), size)]
        return HostBlock(free.pop(), words, free)
