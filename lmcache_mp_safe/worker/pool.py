"""The server's shared-memory pool, mapped by a worker.

Mapped with `os.open` and `mmap`: Python's own `shared_memory` registers what it opens with a tracker that unlinks the
server's segment when this process ends.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lmcache_mp_safe.contract import SHARED_MEMORY, PoolSegment
from lmcache_mp_safe.errors import LocalError, Scope, ServerError
from lmcache_mp_safe.ops.contract import Bytes, SlotMemory

# The pool is sparse: a page that was never written has no memory yet. Memory is claimed in steps of this size.
_CLAIM_BYTES = 2 << 20


class MappedPool:
    """One epoch's pool. Invariant: `_claimed` holds the steps whose memory exists."""

    def __init__(self, segment: PoolSegment, adopt: Callable[[Bytes], SlotMemory]) -> None:
        """Map it.

        Args:
            adopt: has the backend prepare what its copies touch.

        Raises:
            ServerError: it is not there, not the proven one, or smaller than it should be.
        """
        self.segment = segment
        path = SHARED_MEMORY / segment.name.lstrip("/")
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ServerError(
                f"cannot open {path}: {error.strerror}; server and vLLM must share /dev/shm and the user id",
                scope=Scope.SERVER,
            ) from error
        try:
            self._check(path)
            self._map = mmap.mmap(self._file, segment.size)
        except BaseException:
            os.close(self._file)
            raise
        self._bytes: Bytes | None = np.frombuffer(self._map, dtype=np.uint8)
        self._memory = adopt(self._bytes)
        self._claimed: set[int] = set()

    def _check(self, path: Path) -> None:
        status = os.fstat(self._file)
        if status.st_ino != self.segment.inode:
            raise ServerError(
                f"{path} is not the server's pool: another server uses the same --shm-name, or this process sees"
                " another /dev/shm",
                scope=Scope.SERVER,
            )
        if status.st_size < self.segment.size:
            raise ServerError(
                f"{path} has {status.st_size} bytes, the server says {self.segment.size}", scope=Scope.SERVER
            )

    def view(self, offset: int, size: int) -> Bytes:
        """The bytes [offset, offset + size).

        Raises:
            ServerError: they are not inside of the pool.
            LocalError: the pool is closed.
        """
        if self._bytes is None:
            raise LocalError("the pool was unmapped")
        if offset < 0 or size < 0 or offset + size > self.segment.size:
            raise ServerError(f"slot at {offset} with {size} bytes is outside of the pool of {self.segment.size}")
        return self._bytes[offset : offset + size]

    def prepare(self, offset: int, size: int) -> Bytes:
        """The bytes [offset, offset + size), with memory behind them, ready for copies.

        Raises:
            ServerError: they are not inside of the pool, or /dev/shm is full.
            LocalError: the pool is closed.
        """
        view = self.view(offset, size)
        self.claim(offset, size)
        self._memory.make_ready(offset, size)
        return view

    def claim(self, offset: int, size: int) -> None:
        """Make sure that these bytes have memory: where /dev/shm is full, touching a page that was never written is
        SIGBUS, for a read as for a write, and here it is an error.

        Raises:
            ServerError: /dev/shm is full.
        """
        for step in range(offset // _CLAIM_BYTES, -(-(offset + size) // _CLAIM_BYTES)):
            if step in self._claimed:
                continue
            start = step * _CLAIM_BYTES
            try:
                os.posix_fallocate(self._file, start, min(_CLAIM_BYTES, self.segment.size - start))
            except OSError:
                self._claim_exactly(offset, size)  # no room for the neighbours, perhaps for these
                return
            self._claimed.add(step)

    def _claim_exactly(self, offset: int, size: int) -> None:
        try:
            os.posix_fallocate(self._file, offset, size)
        except OSError as error:
            raise ServerError(
                f"no memory left in /dev/shm for the LMCache server's pool ({error.strerror});"
                " enlarge /dev/shm or lower the server's --l1-size-gb"
            ) from error

    def close(self) -> None:
        """Unmap. Nothing may be using a view any more."""
        if self._bytes is None:
            return
        self._memory.release()
        self._bytes = None
        with contextlib.suppress(BufferError):  # a view is still alive somewhere: the map goes with it
            self._map.close()
        os.close(self._file)
