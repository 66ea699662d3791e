"""What a device with streams offers: the few operations that `ops/streamed.py` is written in.

All addresses are integers in one address space: device memory, pinned host memory and the server's pool. Work goes to a
stream in the order in which it is submitted, and nothing here waits for it except `synchronize`. Whoever submits keeps
the memory alive until an event behind the work is done.

Work is submitted as a list of commands, because each call into a driver gives the interpreter away, and beside a busy
engine it takes long to get it back: one call for all copies of a job, not a dozen for each.

Errors: every call raises `DeviceError` for a status that is not success; one that reports an earlier failure of the
device raises it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

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
    """A mark on a stream: where it was recorded last. Whoever waits already waits for where it was before."""

    def done(self) -> bool:
        """Whether everything submitted before the mark is over. Not to be asked before it was recorded."""


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


class Record(NamedTuple):
    """Set the event behind everything that was submitted to the stream by now."""

    stream: Stream
    event: Event


class Wait(NamedTuple):
    """Later work on the stream starts after the event, which may be another stream's."""

    stream: Stream
    event: Event


class Copy(NamedTuple):
    """Copies by the copy engine, between any two kinds of memory.

    Attributes:
        rows: host array of shape (n, 3): source address, target address, bytes. The copies must not overlap, and
            their order is not defined. It may be reused once it was submitted.
    """

    stream: Stream
    rows: Words


class Move(NamedTuple):
    """Copies inside of device memory by a kernel, for runs that are too short for the copy engine.

    Attributes:
        table: device address of `entries` rows of three uint64: source address, target address, bytes. Any alignment.
    """

    stream: Stream
    table: int
    entries: int


class Digest(NamedTuple):
    """XXH3-64 of each tile of a payload in device memory (`geometry/checksum.py`).

    Attributes:
        table: device address of `entries` rows of two uint64: position in the payload, address of the run that starts
            there. Positions grow from 0; a run ends where the next one starts. Any alignment.
        length: bytes of the payload; where it is no multiple of a tile, zeros follow.
        digests: address of one uint64 a tile, in page-locked host memory: the kernel writes there by itself, so no copy
            of a few bytes has to queue behind the long ones of its direction.
    """

    stream: Stream
    table: int
    entries: int
    length: int
    digests: int


Command: TypeAlias = Record | Wait | Copy | Move | Digest


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

    def event(self) -> Event:
        """A new one, which `Record` will set. Waiting for it before that is waiting for nothing."""

    def submit(self, commands: Sequence[Command]) -> None:
        """Submit work, in this order.

        Raises:
            DeviceError: those before the one that failed are submitted.
        """
