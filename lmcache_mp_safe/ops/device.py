"""What a device with streams offers: the few operations that `ops/streamed.py` is written in.

All addresses are integers in one address space: device memory, pinned host memory and the server's pool. Work goes to a
stream in the order in which it is submitted, and nothing here waits for it except `synchronize`. Whoever submits keeps
the memory alive until an event behind the work is done.

Errors: every call raises `DeviceError` for a status that is not success; one that reports an earlier failure of the
device raises it too.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from lmcache_mp_safe.errors import SafeError, Scope

Bytes = NDArray[np.uint8]
Words = NDArray[np.uint64]


class DeviceError(SafeError):
    """The device or its driver refused or failed an operation."""

    def __init__(self, message: str) -> None:
        super().__init__(message, scope=Scope.REQUEST)


class Event(Protocol):
    """A mark on a stream. It comes from `Stream.record`, so there is none that was not recorded."""

    def done(self) -> bool:
        """Whether everything submitted before the mark is over."""


class Stream(Protocol):
    """A queue of work."""

    def record(self) -> Event:
        """A mark behind everything that was submitted by now."""

    def wait(self, event: Event) -> None:
        """Later work on this stream starts after the event, which may be another stream's."""

    def synchronize(self) -> None:
        """Wait on the host. Never in a hook."""


class DeviceMemory(Protocol):
    """Device memory; freed with the object."""

    @property
    def address(self) -> int:
        """Aligned to 256 bytes at least."""


class Device(Protocol):
    """One device, as the process that runs the model sees it. Any thread may call it after `enter`."""

    name: str
    why: str

    def enter(self) -> None:
        """Make this the current device of the calling thread."""

    def compute_stream(self) -> Stream:
        """The stream that the calling thread, the one that runs the model, submits its work to at present."""

    def side_stream(self) -> Stream:
        """A new stream of the lowest priority."""

    def device_memory(self, size: int) -> DeviceMemory:
        """Memory of the device, `size` bytes."""

    def pinned_memory(self, size: int) -> Bytes:
        """Page-locked host memory, shape (size,)."""

    def register(self, address: int, size: int) -> None:
        """Page-lock host memory of this process for copies."""

    def unregister(self, address: int) -> None:
        """Undo `register`, called with the same address."""

    def copy(self, copies: Words, stream: Stream) -> None:
        """Copies by the copy engine, between any two kinds of memory.

        Args:
            copies: host array of shape (n, 3): source address, target address, bytes. It may be reused at once. The
                copies must not overlap; their order is not defined.
        """

    def move(self, table: int, count: int, stream: Stream) -> None:
        """Copies inside of device memory by a kernel, for runs that are too short for the copy engine.

        Args:
            table: device address of `count` rows of three uint64: source address, target address, bytes. Any alignment.
        """

    def digest(self, table: int, count: int, length: int, digests: int, stream: Stream) -> None:
        """XXH3-64 of each tile of a payload in device memory (`geometry/checksum.py`).

        Args:
            table: device address of `count` rows of two uint64: position in the payload, address of the run that
                starts there. Positions grow from 0; a run ends where the next one starts. Any alignment.
            length: bytes of the payload; where it is no multiple of a tile, zeros follow.
            digests: address of one uint64 a tile, in page-locked host memory: the kernel writes there by itself, so no
                copy of a few bytes has to queue behind the long ones of its direction.
        """
