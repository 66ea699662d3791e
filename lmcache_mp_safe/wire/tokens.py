"""What the server gets as an object's "tokens": the object's digest, spread over the ints of one server chunk.

One object is one server chunk, whatever the server's `--chunk-size` is. Small ints are one byte each on the wire, and
the ASCII codes of the digest's hex digits are small.

Tokens are made in the form in which LMCache's client sends them (msgpack) and never as Python ints: each object once, a
sequence by putting them together. `msgspec.Raw` goes through the client's encoder as it is.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import msgspec

from lmcache_mp_safe.errors import Scope, ServerError

DIGEST_BYTES = 32
MIN_CHUNK = 8  # the server takes ints of 32 bits

_ARRAY = 0xDD  # msgpack: an array, its length as 32 bits behind it
_INT = b"\xce"  # msgpack: an int, as 32 bits behind it
_ZERO = b"\x00"  # msgpack: an int below 128 is the byte itself


def check_chunk(chunk: int) -> None:
    """
    Raises:
        ServerError: the server's chunk is too short for a digest.
    """
    if chunk < MIN_CHUNK:
        raise ServerError(
            f"the server's --chunk-size is {chunk}; at least {MIN_CHUNK} are needed, the default is 256",
            scope=Scope.SERVER,
        )


def encoded_object(digest: bytes, chunk: int) -> bytes:
    """The digest (32 bytes) as `chunk` encoded ints; different digests give different ints."""
    if chunk >= 2 * DIGEST_BYTES:
        return digest.hex().encode() + _ZERO * (chunk - 2 * DIGEST_BYTES)
    width = -(-DIGEST_BYTES // chunk)  # bytes of the digest in an int
    parts = [digest[start : start + width].rjust(4, b"\x00") for start in range(0, DIGEST_BYTES, width)]
    return b"".join(_INT + part for part in parts) + _ZERO * (chunk - len(parts))


def token_array(objects: Sequence[bytes], chunk: int, suffix: Sequence[int] = ()) -> msgspec.Raw:
    """Encoded objects one after the other, and further ints behind them, as one array."""
    length = struct.pack(">BI", _ARRAY, len(objects) * chunk + len(suffix))
    return msgspec.Raw(b"".join((length, *objects, *map(msgspec.msgpack.encode, suffix))))


def synthetic_tokens(digests: Sequence[bytes], chunk: int) -> msgspec.Raw:
    """The tokens of a sequence of objects with these digests."""
    return token_array([encoded_object(digest, chunk) for digest in digests], chunk)


def plain_tokens(tokens: msgspec.Raw) -> tuple[int, ...]:
    """What the server decodes."""
    return msgspec.msgpack.decode(tokens, type=tuple[int, ...])
