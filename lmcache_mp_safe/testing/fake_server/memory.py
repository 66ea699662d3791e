"""The pool's bytes."""

from __future__ import annotations

import mmap
import os
import secrets
from pathlib import Path
from typing import Protocol

from lmcache_mp_safe.contract import SHARED_MEMORY


class Memory(Protocol):
    """What the server needs of its pool."""

    @property
    def size(self) -> int: ...

    def write(self, offset: int, data: bytes) -> None: ...

    def renew(self) -> None:
        """A restart: the old segment loses its name but keeps its bytes; a new one of the same name is empty."""


class SharedMemory:
    """A segment in /dev/shm, sparse, with a name of its own."""

    def __init__(self, size: int) -> None:
        self.name = f"lmcache_mp_safe_fake_{secrets.token_hex(8)}"
        self.size = size
        self.path: Path = SHARED_MEMORY / self.name
        self._create()

    def read(self, offset: int, length: int) -> bytes:
        return self._map[offset : offset + length]

    def write(self, offset: int, data: bytes) -> None:
        self._map[offset : offset + len(data)] = data

    def renew(self) -> None:
        self.close()
        self._create()

    def close(self) -> None:
        self._map.close()
        self.path.unlink(missing_ok=True)

    def _create(self) -> None:
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.truncate(file, self.size)
            self._map = mmap.mmap(file, self.size)
        finally:
            os.close(file)
