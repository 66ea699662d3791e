"""A device in small: streams are queues of closures over host memory, and they advance when a test says so.

A copy reads what is there when it *runs*, so a missing fence reads the wrong bytes here as it would on a GPU.
"""

from __future__ import annotations

import ctypes
import functools
from collections import deque
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import numpy as np

from lmcache_mp_safe.geometry.checksum import TILE_BYTES, PayloadChecksum
from lmcache_mp_safe.ops.device import Bytes, Command, Copy, DeviceError, Digest, Move, Record, Wait, Words


class _Mark:
    """A place on a stream."""

    def __init__(self, *, reached: bool) -> None:
        self.reached = reached

    def reach(self) -> None:
        self.reached = True

    def is_reached(self) -> bool:
        return self.reached


class SimEvent:
    """Recorded again it marks another place; whoever waits already waits for the old one."""

    def __init__(self, *, reached: bool = True) -> None:
        self.mark = _Mark(reached=reached)  # where nothing was recorded there is nothing to wait for

    def done(self) -> bool:
        return self.mark.reached


class SimStream:
    """Work in order. An entry returns whether it could run; one that could not is tried again."""

    def __init__(self, device: SimDevice) -> None:
        self._device = device
        self.work: deque[Callable[[], bool]] = deque()

    def submit(self, act: Callable[[], object]) -> None:
        def run() -> bool:
            act()
            return True

        self.work.append(run)
        self._device.submitted()

    def record(self, event: SimEvent | None = None) -> SimEvent:
        event = event if event is not None else SimEvent()
        event.mark = _Mark(reached=False)
        self.submit(event.mark.reach)
        return event

    def wait(self, event: SimEvent) -> None:
        self.work.append(event.mark.is_reached)
        self._device.submitted()

    def step(self) -> bool:
        """Run the head; whether it ran."""
        if not self.work or not self.work[0]():
            return False
        self.work.popleft()
        return True

    def synchronize(self) -> None:
        while self.work:
            if not any(stream.step() for stream in self._device.streams):
                raise DeviceError("the streams wait for each other, or for work that nobody submits")


class SimMemory:
    def __init__(self, size: int) -> None:
        self.bytes = np.zeros(size, np.uint8)

    @property
    def address(self) -> int:
        return int(self.bytes.ctypes.data)


class SimDevice:
    """A `Device`.

    Args:
        eager: work runs when it is submitted, as far as it can.
        may_register: False refuses to page-lock memory, as a driver may.
    """

    name, why = "sim", "test"

    def __init__(self, *, eager: bool = False, may_register: bool = True) -> None:
        self.eager = eager
        self.may_register = may_register
        self.streams: list[SimStream] = []
        self.compute = self.side_stream()
        self.registered: dict[int, int] = {}

    def submitted(self) -> None:
        if self.eager:
            self.run()

    def run(self) -> None:
        """Run everything that can run."""
        while any(stream.step() for stream in self.streams):
            pass

    def run_some(self, random: Random, steps: int) -> None:
        """Run heads of streams in the order that the seed chooses."""
        for _ in range(steps):
            random.choice(self.streams).step()

    def enter(self) -> None:
        """There is one device."""

    def compute_stream(self) -> SimStream:
        return self.compute

    def side_stream(self) -> SimStream:
        self.streams.append(SimStream(self))
        return self.streams[-1]

    def device_memory(self, size: int) -> SimMemory:
        return SimMemory(size)

    def pinned_memory(self, size: int) -> Bytes:
        return np.zeros(size, np.uint8)

    def register(self, address: int, size: int) -> None:
        if not self.may_register:
            raise DeviceError("this device does not page-lock memory")
        if address in self.registered:
            raise DeviceError("already registered")
        self.registered[address] = size

    def unregister(self, address: int) -> None:
        if self.registered.pop(address, None) is None:
            raise DeviceError("not registered")

    def event(self) -> SimEvent:
        return SimEvent()

    def submit(self, commands: Sequence[Command]) -> None:
        for command in commands:
            stream: Any = command.stream  # one of this device
            match command:
                case Record(_, event):
                    stream.record(event)
                case Wait(_, event):
                    stream.wait(event)
                case Copy(_, rows):
                    for source, target, size in rows.tolist():
                        stream.submit(functools.partial(ctypes.memmove, target, source, size))
                case Move():
                    stream.submit(functools.partial(_move, command))
                case Digest():
                    stream.submit(functools.partial(_digest, command))


def _move(command: Move) -> None:
    for source, target, size in _words(command.table, command.entries * 3).reshape(-1, 3).tolist():
        ctypes.memmove(target, source, size)


def _digest(command: Digest) -> None:
    payload = bytearray()
    runs = _words(command.table, command.entries * 2).reshape(-1, 2).tolist()
    ends = [start for start, _ in runs[1:]] + [command.length]
    for (start, address), end in zip(runs, ends, strict=True):
        payload += ctypes.string_at(address, end - start)
    state = PayloadChecksum()
    state.update(np.frombuffer(bytes(payload) + bytes(-command.length % TILE_BYTES), np.uint8))
    found = np.array(state.tiles, np.uint64)
    ctypes.memmove(command.digests, found.ctypes.data, found.nbytes)


def _words(address: int, count: int) -> Words:
    return np.frombuffer(ctypes.string_at(address, count * 8), np.uint64)
