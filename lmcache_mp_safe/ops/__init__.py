"""Page copies and checksums on a device. Knows buffers and spans, no request and no server.

The choice of a backend is made once, aloud: `auto` takes the best that fits, a named one works or is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lmcache_mp_safe.errors import ConfigError
from lmcache_mp_safe.ops.contract import Backend
from lmcache_mp_safe.ops.reference import ReferenceBackend

__all__ = ["Backend", "choose_backend"]


def choose_backend(buffers: Sequence[Any], wanted: str) -> Backend:
    """The backend for these KV cache buffers (flat uint8 torch tensors).

    Raises:
        ConfigError: the wanted backend does not exist or cannot serve the device.
    """
    devices = sorted({buffer.device.type for buffer in buffers})
    if wanted not in ("auto", "reference"):
        raise ConfigError(f"lmcache.mp.safe.backend {wanted!r} does not exist; use 'auto' or 'reference'")
    if devices != ["cpu"]:
        raise ConfigError(
            f"the KV cache is on {', '.join(devices) or 'no device'}, which is not supported yet: only KV caches in CPU"
            " memory are; remove --kv-transfer-config"
        )
    return ReferenceBackend([buffer.numpy() for buffer in buffers], why="the KV cache is in CPU memory")
