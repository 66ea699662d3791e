"""The server's pool, page-locked for the copy engine step by step as its slots are first used.

Locking all of a large pool at the start would take seconds (about 65 ms a GiB); a copy to memory that is not locked
reaches a third of the speed and blocks the host. A copy must not cross the border between two registrations.
"""

from __future__ import annotations

import logging

import numpy as np

from lmcache_mp_safe.ops.contract import Bytes
from lmcache_mp_safe.ops.device import Device, DeviceError, Words

logger = logging.getLogger("vllm.lmcache_mp_safe.ops")

STEP_BYTES = 64 << 20


class PinnedMemory:
    """One mapped pool. Invariant: `_pinned` holds the steps that are registered with the device, nothing else does."""

    def __init__(self, device: Device, memory: Bytes, step_bytes: int = STEP_BYTES) -> None:
        self._device = device
        self._memory = memory
        self._address = int(memory.ctypes.data)
        self._step_bytes = step_bytes
        self._pinned: set[int] = set()
        self._refused: set[int] = set()
        self.released = False

    def make_ready(self, offset: int, size: int) -> None:
        """Register the steps that these bytes lie in. A step that the driver refuses is not asked for again."""
        for step in self._steps(offset, size) - self._pinned - self._refused:
            start = step * self._step_bytes
            try:
                self._device.register(self._address + start, min(self._step_bytes, len(self._memory) - start))
            except DeviceError as error:
                if not self._refused:
                    logger.warning("the server's pool cannot be page-locked, its copies are slower: %s", error)
                self._refused.add(step)
            else:
                self._pinned.add(step)

    def owns(self, address: int) -> bool:
        return self._address <= address < self._address + len(self._memory)

    def is_pinned(self, address: int, size: int) -> bool:
        return self._steps(address - self._address, size) <= self._pinned

    def cut(self, copies: Words, column: int) -> Words:
        """Copies (rows of two addresses and bytes), in any order, none across a step by its `column`."""
        start = copies[:, column] - np.uint64(self._address)
        last = start + copies[:, 2] - np.uint64(1)
        step = np.uint64(self._step_bytes)
        crosses = start // step != last // step
        if not crosses.any():
            return copies
        parts = [part for row in copies[crosses].tolist() for part in self._parts(row, column)]
        return np.concatenate([copies[~crosses], np.array(parts, dtype=np.uint64)])

    def _parts(self, row: list[int], column: int) -> list[tuple[int, int, int]]:
        parts = []
        first, second, rest = row
        while rest:
            used = (row[column] - self._address + row[2] - rest) % self._step_bytes
            size = min(rest, self._step_bytes - used)
            parts.append((first, second, size))
            first, second, rest = first + size, second + size, rest - size
        return parts

    def release(self) -> None:
        """Unregister everything."""
        self.released = True
        while self._pinned:
            step = self._pinned.pop()
            try:
                self._device.unregister(self._address + step * self._step_bytes)
            except DeviceError as error:
                logger.warning("page-locked memory could not be released: %s", error)

    def _steps(self, offset: int, size: int) -> set[int]:
        return set(range(offset // self._step_bytes, -(-(offset + size) // self._step_bytes)))
