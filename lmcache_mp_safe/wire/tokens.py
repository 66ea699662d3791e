"""What the server gets as an object's "tokens": the object's digest, spread over the ints of one server chunk.

One object is one server chunk, whatever the server's `--chunk-size` is. Small ints are one byte each on the wire.

Tokens are made in the form in which LMCache's client sends them (msgpack) and never as Python ints: each object once, a
sequence by putting them together. `msgspec.Raw` goes through the client's encoder as it is.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from lmcache_mp_safe.errors import Scope, ServerError

DIGEST_BYTES = 32
MIN_CHUNK = 8  # the server takes ints of 32 bits

_BYTE_BITS = 7  # msgpack: an int below 128 is the byte itself
_ARRAY = 0xDD  # msgpack: an array, its length as 32 bits behind it
_INT = 0xCE  # msgpack: an int, as 32 bits behind it
_WIDE = np.dtype([("tag", "u1"), ("value", ">u4")])


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
    return max(_BYTE_BITS, -(-8 * DIGEST_BYTES // chunk))


def encoded_objects(digests: Sequence[bytes], chunk: int) -> list[bytes]:
    """Each digest (32 bytes) as `chunk` encoded ints; different digests give different ints."""
    bits = bits_per_int(chunk)
    count = -(-8 * DIGEST_BYTES // bits)
    raw = np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(-1, DIGEST_BYTES)
    spread = np.zeros((len(raw), count * bits), dtype=np.int64)
    spread[:, : 8 * DIGEST_BYTES] = np.unpackbits(raw, axis=1)
    ints = np.zeros((len(raw), chunk), dtype=np.uint32)
    ints[:, :count] = spread.reshape(-1, count, bits) @ (1 << np.arange(bits, dtype=np.int64))
    return [row.tobytes() for row in (ints.astype(np.uint8) if bits == _BYTE_BITS else _wide(ints))]


def _wide(ints: npt.NDArray[np.uint32]) -> npt.NDArray[np.void]:
    encoded = np.empty(ints.shape, dtype=_WIDE)
    encoded["tag"], encoded["value"] = _INT, ints
    return encoded


def token_array(objects: Sequence[bytes], chunk: int, suffix: Sequence[int] = ()) -> msgspec.Raw:
    """Encoded objects one after the other, and further ints behind them, as one array."""
    length = struct.pack(">BI", _ARRAY, len(objects) * chunk + len(suffix))
    return msgspec.Raw(b"".join((length, *objects, *map(msgspec.msgpack.encode, suffix))))


def synthetic_tokens(digests: Sequence[bytes], chunk: int) -> msgspec.Raw:
    """The tokens of a sequence of objects with these digests."""
    return token_array(encoded_objects(digests, chunk), chunk)


def plain_tokens(tokens: msgspec.Raw) -> tuple[int, ...]:
    """What the server decodes."""
    return msgspec.msgpack.decode(tokens, type=tuple[int, ...])
