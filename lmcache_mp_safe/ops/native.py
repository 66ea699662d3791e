"""A CUDA device through the package's own library, csrc/."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_char_p, c_int, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from lmcache_mp_safe.ops.device import Command, Copy, DeviceError, Digest, Move, Record, Wait
from lmcache_mp_safe.ops.torch_device import TorchDevice, event_handle, stream_handle

LIBRARY = Path(__file__).parents[1] / "_cuda.so"
HOW_TO_BUILD = (
    "in a checkout of lmcache-mp-safe, with nvcc on PATH:"
    " LMCACHE_MP_SAFE_CUDA=1 pip install --no-deps --no-build-isolation --editable ."
)

# csrc/bindings.cpp: name -> result, arguments.
SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "last_error": (c_char_p, []),
    "architectures": (c_char_p, []),
    "runtime_version": (c_int, []),
    "has_batch_copy": (c_int, []),
    "set_device": (c_int, [c_int]),
    "load_kernels": (c_int, []),
    "register": (c_int, [c_uint64, c_uint64]),
    "unregister": (c_int, [c_uint64]),
    "submit": (c_int, [c_void_p, c_int64, c_int]),
}

COMMANDS: tuple[type[Command], ...] = (Record, Wait, Copy, Move, Digest)  # csrc/commands.h: their numbers
ROW_WORDS = 6  # number, stream, and up to four arguments


class Library:
    """The functions of the library. One that fails raises `DeviceError` with the text that the library has for it."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions = {}
        for name, (result, arguments) in SIGNATURES.items():
            function = library[f"lmcache_mp_safe_{name}"]
            function.restype, function.argtypes = result, arguments
            self._functions[name] = function

    def submit(self, rows: Sequence[Sequence[int]], *, force_loop: bool = False) -> None:
        """Commands as csrc/commands.h has them; see `row_of`."""
        table = np.array([[*row, *[0] * (ROW_WORDS - len(row))] for row in rows], np.uint64).reshape(-1, ROW_WORDS)
        self.call("submit", table.ctypes.data, len(table), force_loop)

    def call(self, name: str, *arguments: int) -> None:
        if self._functions[name](*arguments) != 0:
            raise DeviceError(self._functions["last_error"]().decode())

    @property
    def has_batch_copy(self) -> bool:
        return bool(self._functions["has_batch_copy"]())

    def __str__(self) -> str:
        major, minor = divmod(self._functions["runtime_version"](), 1000)
        copies = "one call for many copies" if self.has_batch_copy else "a call for each copy"
        architectures = self._functions["architectures"]().decode()
        return f"compiled for {architectures} with CUDA {major}.{minor // 10}, {copies}"


def load_library(path: Path = LIBRARY) -> Library:
    """Raises `DeviceError` where there is no library, or one that cannot be loaded; it says what to do."""
    if not path.exists():
        raise DeviceError(f"the CUDA library {path} was not built. Build it {HOW_TO_BUILD}")
    try:
        return Library(ctypes.CDLL(str(path)))
    except (OSError, AttributeError) as error:
        raise DeviceError(f"the CUDA library {path} does not fit here ({error}). Build it {HOW_TO_BUILD}") from error


class NativeDevice(TorchDevice):
    """See `Device`.

    Args:
        force_loop: submit each copy in a call of its own. For tests and benchmarks.
    """

    name = "csrc"

    def __init__(self, device: Any, *, why: str, force_loop: bool = False) -> None:
        self._library = load_library()
        super().__init__(device)
        self._force_loop = force_loop
        self.enter()
        self._library.call("load_kernels")
        self.why = f"{why} ({self._library})"

    def enter(self) -> None:
        super().enter()
        # The library has a CUDA runtime of its own, and torch makes no call where its device is the right one already.
        self._library.call("set_device", self.index)

    def register(self, address: int, size: int) -> None:
        self._library.call("register", address, size)

    def unregister(self, address: int) -> None:
        self._library.call("unregister", address)

    def submit(self, commands: Sequence[Command]) -> None:
        self._library.submit([row_of(command) for command in commands], force_loop=self._force_loop)


def row_of(command: Command) -> list[int]:
    """The command in integers. The memory of its rows, if any, is the command's."""
    row = [COMMANDS.index(type(command)), stream_handle(command.stream)]
    match command:
        case Record(_, event) | Wait(_, event):
            return [*row, event_handle(event)]
        case Copy(_, rows):
            assert rows.flags.c_contiguous
            assert rows.dtype == np.uint64
            return [*row, rows.ctypes.data, len(rows)]
        case Move(_, table, entries):
            return [*row, table, entries]
        case Digest(_, table, entries, length, digests):
            return [*row, table, entries, length, digests]
