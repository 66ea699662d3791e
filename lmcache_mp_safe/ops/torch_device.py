"""Streams, events and memory of a CUDA device, from torch. What moves bytes is left to those who derive from it."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import torch

from lmcache_mp_safe.errors import LocalError
from lmcache_mp_safe.ops.device import Bytes, Command, DeviceError, Event, Stream

P = ParamSpec("P")
T = TypeVar("T")


def raises_device_error(function: Callable[P, T]) -> Callable[P, T]:
    """Turn what torch and cupy raise for a status that is not success into `DeviceError`."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (RuntimeError, AssertionError) as error:  # a torch without CUDA asserts that it has it
            raise DeviceError(str(error)) from error

    return call


class TorchEvent:
    """A CUDA event, borrowed from a pool for as long as somebody has this mark."""

    def __init__(self, event: Any, spare: list[Any]) -> None:
        self.event = event
        self._spare = spare

    def __del__(self) -> None:
        self._spare.append(self.event)

    @raises_device_error
    def done(self) -> bool:
        return bool(self.event.query())


class EventPool:
    """CUDA events that are used again and never destroyed.

    Making and destroying them are calls of the driver that torch makes without giving the interpreter up. While the
    driver's queues are full of copies such a call takes a millisecond, in which the engine's thread cannot go on.
    """

    def __init__(self) -> None:
        self._spare: list[Any] = []

    def take(self) -> TorchEvent:
        """One that may have been recorded, for another mark that nobody has any more."""
        try:
            event = self._spare.pop()
        except IndexError:
            event = torch.cuda.Event()
        return TorchEvent(event, self._spare)


class TorchStream:
    def __init__(self, stream: Any, events: EventPool) -> None:
        self.stream = stream
        self._events = events
        self.handle: int = stream.cuda_stream

    @raises_device_error
    def record(self) -> Event:
        mark = self._events.take()
        mark.event.record(self.stream)
        return mark

    @raises_device_error
    def wait(self, event: Event) -> None:
        self.stream.wait_event(_own(event).event)

    @raises_device_error
    def synchronize(self) -> None:
        self.stream.synchronize()


def _own(event: Event) -> TorchEvent:
    if not isinstance(event, TorchEvent):
        raise LocalError(f"{event!r} is an event of another device")
    return event


def stream_handle(stream: Stream) -> int:
    """The stream as the CUDA API knows it."""
    if not isinstance(stream, TorchStream):
        raise LocalError(f"{stream!r} is a stream of another device")
    return stream.handle


def event_handle(event: Event) -> int:
    """The event as the CUDA API knows it."""
    return cast(int, _own(event).event.cuda_event)


class TorchMemory:
    def __init__(self, tensor: Any) -> None:
        self._tensor = tensor
        self.address: int = tensor.data_ptr()


class TorchDevice(abc.ABC):
    """One device. Must be made by a thread that may use it; see `Device`."""

    name: str
    why: str

    @raises_device_error
    def __init__(self, device: Any) -> None:
        torch.cuda.init()
        self._device = torch.device(device)
        if self._device.index is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        # torch hands out memory in the order of a stream: whoever had it before may still use it, in earlier work of
        # that stream. On a stream that never has any work there is nobody.
        self._idle_stream = self._new_stream()
        self._events = EventPool()

    @property
    def index(self) -> int:
        return cast(int, self._device.index)

    @raises_device_error
    def enter(self) -> None:
        torch.cuda.set_device(self._device)

    @raises_device_error
    def compute_stream(self) -> Stream:
        return TorchStream(torch.cuda.current_stream(self._device), self._events)

    @raises_device_error
    def side_stream(self) -> Stream:
        return TorchStream(self._new_stream(), self._events)

    @raises_device_error
    def device_memory(self, size: int) -> TorchMemory:
        with torch.cuda.stream(self._idle_stream):
            return TorchMemory(torch.empty(size, dtype=torch.uint8, device=self._device))

    @raises_device_error
    def pinned_memory(self, size: int) -> Bytes:
        return cast(Bytes, torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True).numpy())

    @abc.abstractmethod
    def register(self, address: int, size: int) -> None: ...

    @abc.abstractmethod
    def unregister(self, address: int) -> None: ...

    @raises_device_error
    def event(self) -> Event:
        mark = self._events.take()
        if not mark.event.cuda_event:  # torch makes it when it is first recorded, and here the device is to record it
            mark.event.record(self._idle_stream)
        return mark

    @abc.abstractmethod
    def submit(self, commands: Sequence[Command]) -> None: ...

    def _new_stream(self) -> Any:
        lowest = max(torch.cuda.Stream.priority_range())  # the lower the number, the higher the priority
        return torch.cuda.Stream(self._device, priority=lowest)
