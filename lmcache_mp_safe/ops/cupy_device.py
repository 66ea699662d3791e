"""A CUDA device through cupy, for machines without a compiler: the same kernels, compiled by NVRTC at start-up."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch

from lmcache_mp_safe.ops.device import DeviceError, Stream, Words
from lmcache_mp_safe.ops.kernels import THREADS, digest_grid, kernel_source, move_grid
from lmcache_mp_safe.ops.torch_device import TorchDevice, handle_of, raises_device_error

HOST_REGISTER_PORTABLE = 1
MEMCPY_DEFAULT = 4


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
    def copy(self, copies: Words, stream: Stream) -> None:
        handle = handle_of(stream)
        for source, target, size in copies.reshape(-1, 3).tolist():
            if size:
                self._runtime.memcpyAsync(target, source, size, MEMCPY_DEFAULT, handle)

    @raises_device_error
    def move(self, table: int, count: int, stream: Stream) -> None:
        if count < 0:
            raise DeviceError(f"move: {count} rows")
        if count > 0:
            grid = move_grid(count, self._multiprocessors)
            with self._cupy_stream(stream):
                self._move((grid,), (THREADS,), (np.uint64(table), np.int32(count)))

    @raises_device_error
    def digest(self, table: int, count: int, length: int, digests: int, stream: Stream) -> None:
        if length > 0 >= count:
            raise DeviceError(f"digest: {count} runs for {length} bytes")
        if length > 0:
            arguments = (np.uint64(table), np.int32(count), np.uint64(length), np.uint64(digests))
            grid = digest_grid(length, self._multiprocessors)
            with self._cupy_stream(stream):
                self._digest((grid,), (THREADS,), arguments)

    def _kernel(self, file: str, function: str) -> Any:
        try:
            kernel = self._cupy.RawModule(code=kernel_source(file), options=("-std=c++17",)).get_function(function)
            kernel.compile()
        except Exception as error:  # the compiler's own errors, a missing NVRTC, a full disk
            raise DeviceError(f"cupy cannot compile {file}.cuh: {error}") from error
        return kernel

    def _cupy_stream(self, stream: Stream) -> Any:
        handle = handle_of(stream)
        if handle not in self._streams:
            with warnings.catch_warnings():
                # cupy 14 would have us use Stream.from_external, which cupy 13 lacks, and which in some versions
                # destroys the stream that it was given.
                warnings.simplefilter("ignore", DeprecationWarning)
                self._streams[handle] = self._cupy.cuda.ExternalStream(handle, self.index)
        return self._streams[handle]
