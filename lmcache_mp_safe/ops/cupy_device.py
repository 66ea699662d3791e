"""A CUDA device through cupy, for machines without a compiler: the same kernels, compiled by NVRTC at start-up."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lmcache_mp_safe.ops.device import Command, Copy, DeviceError, Digest, Move, Record, Stream, Wait
from lmcache_mp_safe.ops.kernels import THREADS, digest_grid, kernel_source, move_grid
from lmcache_mp_safe.ops.torch_device import TorchDevice, event_handle, raises_device_error, stream_handle

HOST_REGISTER_PORTABLE = 1
MEMCPY_DEFAULT = 4
MOST_ROWS = 2**31 - 1  # a kernel counts them in 32 bits


def import_cupy() -> Any:
    """Imported late: it is optional, and takes a second."""
    try:
        import cupy
    except Exception as error:  # one that does not fit the machine raises anything
        raise DeviceError(f"cupy cannot be imported ({error}): pip install cupy-cuda13x, or -cuda12x") from error
    return cupy


class CupyDevice(TorchDevice):
    """See `Device`. Copies cost one call each."""

    name = "cupy"

    def __init__(self, device: Any, *, why: str) -> None:
        self._cupy = import_cupy()
        super().__init__(device)
        self._runtime = self._cupy.cuda.runtime
        self._streams: dict[int, Any] = {}
        self.enter()
        self._move = self._kernel("move", "move_runs")
        self._digest = self._kernel("digest", "digest_tiles")
        self._multiprocessors: int = torch.cuda.get_device_properties(self._device).multi_processor_count
        version = self._runtime.runtimeGetVersion()
        self.why = f"{why} (kernels compiled by cupy, CUDA {version // 1000}.{version % 1000 // 10})"

    @raises_device_error
    def enter(self) -> None:
        super().enter()
        self._runtime.setDevice(self.index)  # cupy has a CUDA runtime of its own

    @raises_device_error
    def register(self, address: int, size: int) -> None:
        self._runtime.hostRegister(address, size, HOST_REGISTER_PORTABLE)

    @raises_device_error
    def unregister(self, address: int) -> None:
        self._runtime.hostUnregister(address)

    @raises_device_error
    def submit(self, commands: Sequence[Command]) -> None:
        for command in commands:
            self._submit(command)

    def _submit(self, command: Command) -> None:
        match command:
            case Record(stream, event):
                self._runtime.eventRecord(event_handle(event), stream_handle(stream))
            case Wait(stream, event):
                self._runtime.streamWaitEvent(stream_handle(stream), event_handle(event))
            case Copy():
                self._copy(command)
            case Move(stream, table, entries):
                if not 0 <= entries <= MOST_ROWS:
                    raise DeviceError(f"move: {entries} rows")
                grid = move_grid(entries, self._multiprocessors)
                self._launch(self._move, grid, stream, (np.uint64(table), np.int32(entries)))
            case Digest(stream, table, entries, length, digests):
                if length > 0 and not 0 < entries <= MOST_ROWS:
                    raise DeviceError(f"digest: {entries} runs for {length} bytes")
                grid = digest_grid(length, self._multiprocessors)
                arguments = (np.uint64(table), np.int32(entries), np.uint64(length), np.uint64(digests))
                self._launch(self._digest, grid, stream, arguments)

    def _copy(self, command: Copy) -> None:
        handle = stream_handle(command.stream)
        for source, target, size in command.rows.tolist():
            if size:
                self._runtime.memcpyAsync(target, source, size, MEMCPY_DEFAULT, handle)

    def _launch(self, kernel: Any, grid: int, stream: Stream, arguments: tuple[Any, ...]) -> None:
        if grid:
            with self._cupy_stream(stream):
                kernel((grid,), (THREADS,), arguments)

    def _kernel(self, file: str, function: str) -> Any:
        try:
            kernel = self._cupy.RawModule(code=kernel_source(file), options=("-std=c++17",)).get_function(function)
            kernel.compile()
        except Exception as error:  # the compiler's own errors, a missing NVRTC, a full disk
            raise DeviceError(f"cupy cannot compile {file}.cuh: {error}") from error
        return kernel

    def _cupy_stream(self, stream: Stream) -> Any:
        handle = stream_handle(stream)
        if handle not in self._streams:
            with warnings.catch_warnings():
                # cupy 14 would have us use Stream.from_external, which cupy 13 lacks, and which in some versions
                # destroys the stream that it was given.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._streams[handle] = self._cupy.cuda.ExternalStream(handle, self.index)
        return self._streams[handle]
