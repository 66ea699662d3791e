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
    def __init__(self, event: Any) -> None:
        self.event = event

    @raises_device_error
    def done(self) -> bool:
        return bool(self.event.query())


class TorchStream:
    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.handle: int = stream.cuda_stream

    @raises_device_error
    def record(self) -> Event:
        return TorchEvent(self.stream.record_event())

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

    @property
    def index(self) -> int:
        return cast(int, self._device.index)

    @raises_device_error
    def enter(self) -> None:
        torch.cuda.set_device(self._device)

    @raises_device_error
    def compute_stream(self) -> Stream:
        return TorchStream(torch.cuda.current_stream(self._device))

    @raises_device_error
    def side_stream(self) -> Stream:
        return TorchStream(self._new_stream())

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
        return TorchEvent(self._idle_stream.record_event())  # torch makes it when it is recorded first

    @abc.abstractmethod
    def submit(self, commands: Sequence[Command]) -> None: ...

    def _new_stream(self) -> Any:
        lowest = max(torch.cuda.Stream.priority_range())  # the lower the number, the higher the priority
        return torch.cuda.Stream(self._device, priority=lowest)
