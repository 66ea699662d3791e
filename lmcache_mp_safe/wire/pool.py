"""The server's pool as the scheduler sees it: opened read-only, for seals and for the proof that it is the server's."""

from __future__ import annotations

import os

from lmcache_mp_safe.contract import SHARED_MEMORY
from lmcache_mp_safe.errors import Scope, ServerError


class PoolView:
    """One segment, to read from. By `pread`: reading a map of a segment that was truncated kills the process."""

    def __init__(self, name: str, size: int) -> None:
        """Open it.

        Raises:
            ServerError: the segment is not there, or smaller than it should be.
        """
        self.path = SHARED_MEMORY / name.lstrip("/")
        self.size = size
        try:
            self._file = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ServerError(
                f"cannot open the server's pool {self.path} ({error.strerror}); server and vLLM must share /dev/shm"
                " and the user id",
                scope=Scope.SERVER,
            ) from error
        try:
            status = os.fstat(self._file)
            if status.st_size < size:
                raise ServerError(f"{self.path} has {status.st_size} bytes, the server says {size}", scope=Scope.SERVER)
            self._check_room(size, status)
            self.inode = status.st_ino
        except BaseException:
            os.close(self._file)
            raise
        self._closed = False

    def _check_room(self, size: int, status: os.stat_result) -> None:
        """The segment is sparse: what /dev/shm has left must hold what was never written yet."""
        file_system = os.fstatvfs(self._file)
        missing = size - status.st_blocks * 512
        left = file_system.f_bavail * file_system.f_frsize
        if missing > left:
            raise ServerError(
                f"/dev/shm is too small: the server's pool may grow by {missing >> 20} MiB, {left >> 20} MiB are"
                " left; enlarge /dev/shm (containers: --shm-size) or lower the server's --l1-size-gb",
                scope=Scope.SERVER,
            )

    def read(self, offset: int, length: int) -> bytes:
        """The bytes [offset, offset + length).

        Raises:
            ServerError: they are not inside of the pool, or the segment was truncated.
        """
        if offset < 0 or length < 0 or offset + length > self.size:
            raise ServerError(f"{length} bytes at {offset} are outside of the pool of {self.size}")
        found = os.pread(self._file, length, offset)
        if len(found) != length:
            raise ServerError(f"{self.path} was truncated: {len(found)} of {length} bytes at {offset}")
        return found

    @property
    def is_alive(self) -> bool:
        """Whether the segment still has its name and its size: a server that restarts unlinks it and makes another."""
        if self._closed:
            return False
        status = os.fstat(self._file)
        return status.st_nlink > 0 and status.st_size >= self.size

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self._file)
