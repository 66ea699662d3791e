"""Page copies and checksums on a device. Knows buffers and spans, no request and no server.

The choice of a backend is made once, aloud: `auto` takes the best that fits, a named one works or is an error.

    contract.py    what the worker half needs: Backend, Fence, Completion
    reference.py   that, in CPU memory with NumPy: for CPU engines, and the oracle for the others
    streamed.py    that, on a device with streams, written in the few operations of
    device.py      Device: streams, events, copies, two kernels
    native.py      Device by this package's CUDA library (csrc/)
    cupy_device.py Device by CuPy, which compiles the same kernels at run time
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmcache_mp_safe.errors import ConfigError
from lmcache_mp_safe.ops.contract import Backend
from lmcache_mp_safe.ops.device import Device, DeviceError
from lmcache_mp_safe.ops.reference import ReferenceBackend
from lmcache_mp_safe.ops.streamed import DEFAULT_STAGING_BYTES, StreamedBackend

__all__ = ["Backend", "choose_backend", "make_device"]

BACKENDS = ("auto", "csrc", "cupy", "reference")


def choose_backend(buffers: Sequence[Any], wanted: str, staging_bytes: int = DEFAULT_STAGING_BYTES) -> Backend:
    """The backend for these KV cache buffers (flat uint8 torch tensors).

    Raises:
        ConfigError: the wanted backend does not exist or cannot serve the device.
    """
    if wanted not in BACKENDS:
        raise ConfigError(f"lmcache.mp.safe.backend {wanted!r} does not exist; use one of {', '.join(BACKENDS)}")
    kinds, devices = {buffer.device.type for buffer in buffers}, {buffer.device for buffer in buffers}
    if kinds == {"cpu"}:
        if wanted not in ("auto", "reference"):
            raise ConfigError(f"lmcache.mp.safe.backend {wanted!r} copies on a GPU; this KV cache is in CPU memory")
        return ReferenceBackend([buffer.numpy() for buffer in buffers], why="the KV cache is in CPU memory")
    if kinds != {"cuda"} or len(devices) != 1:
        raise ConfigError(
            f"the KV cache is on {', '.join(map(str, sorted(map(str, devices)))) or 'no device'}, which is not"
            " supported: one CUDA device or CPU memory is; remove --kv-transfer-config"
        )
    if wanted == "reference":
        raise ConfigError("lmcache.mp.safe.backend 'reference' copies in CPU memory only; use 'auto', 'csrc' or 'cupy'")
    (device,) = devices
    return StreamedBackend(make_device(device, wanted), buffers, staging_bytes=staging_bytes)


def make_device(device: Any, wanted: str) -> Device:
    """The CUDA device by one of the two libraries.

    Raises:
        ConfigError: neither, or not the wanted one, can be used; says why.
    """
    from lmcache_mp_safe.ops.cupy_device import CupyDevice
    from lmcache_mp_safe.ops.native import NativeDevice

    refused = ""
    if wanted in ("auto", "csrc"):
        try:
            return NativeDevice(device, why="this package's CUDA library is there")
        except DeviceError as error:
            if wanted == "csrc":
                raise ConfigError(f"lmcache.mp.safe.backend 'csrc': {error}") from error
            refused = str(error)
    try:
        return CupyDevice(device, why=f"csrc: {refused}" if refused else "it was asked for")
    except DeviceError as error:
        raise ConfigError(
            f"no backend can copy on {device}: {refused or 'csrc was not asked for'}; cupy: {error}"
        ) from error
