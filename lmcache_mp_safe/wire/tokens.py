"""What the server gets as an object's "tokens": the object's digest, spread over the ints of one server chunk.

One object is one server chunk, whatever the server's `--chunk-size` is. Small ints are one byte each on the wire.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lmcache_mp_safe.errors import Scope, ServerError

DIGEST_BYTES = 32
MIN_CHUNK = 8  # the server takes ints of 32 bits


def bits_per_int(chunk: int) -> int:
    """Bits of the digest in each int: 7 while they fit, which is one byte on the wire.

    Raises:
        ServerError: the server's chunk is too short.
    """
    if chunk < MIN_CHUNK:
        raise ServerError(
            f"the server's --chunk-size is {chunk}; at least {MIN_CHUNK} are needed, the default is 256",
            scope=Scope.SERVER,
        )
    return max(7, -(-8 * DIGEST_BYTES // chunk))


def synthetic_tokens(digests: Sequence[bytes], chunk: int) -> list[int]:
    """The digests (32 bytes each) as `chunk` ints each, one after the other; different digests give different ints."""
    bits = bits_per_int(chunk)
    count = -(-8 * DIGEST_BYTES // bits)
    raw = np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, DIGEST_BYTES)
    spread = np.zeros((len(raw), count * bits), dtype=np.int64)
    spread[:, : 8 * DIGEST_BYTES] = np.unpackbits(raw, axis=1)
    ints = np.zeros((len(raw), chunk), dtype=np.int64)
    ints[:, :count] = spread.reshape(-1, count, bits) @ (1 << np.arange(bits, dtype=np.int64))
    flat: list[int] = ints.ravel().tolist()
    return flat
