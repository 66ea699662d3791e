"""The seal: the last 128 bytes of each rank's slice of a piece. It says which object the slice holds, and that its
writer had finished.

The server publishes objects whose writer died, and hands a buffer whose write lock ran out to the next writer. So its
locks and answers are hints; what makes a load right is the seal, and the checksum in it over the bytes that arrived.

    magic 8 | version 2 | rank 2 | piece 2 | pieces 2 | layout digest 16 | object digest 32 | payload bytes 8
    | payload checksum 8 | writer nonce 16 | zeros | checksum of all that 8

A slot that was given back before a copy began holds what was there before: perhaps, seal and all, the object of the
same tokens of another model, or of this one with the weights it had before a reset. So a seal names the namespace, too.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass

import xxhash

from lmcache_mp_safe.errors import ServerError
from lmcache_mp_safe.geometry.payload import SEAL_BYTES

MAGIC = b"LMSAFE\x00\x01"
# Names the payload checksum, too: 2 is that of `geometry/checksum.py`.
VERSION = 2

_BODY = struct.Struct("<8sHHHH16s32sQQ16s")
_CHECK = struct.Struct("<Q")
_PADDING = SEAL_BYTES - _BODY.size - _CHECK.size

CLEARED = bytes(SEAL_BYTES)


def layout_in(namespace: str, layout_digest: bytes) -> bytes:
    """16 bytes over a rank's layout and the namespace that it is used in."""
    return hashlib.blake2b(layout_digest + namespace.encode(), digest_size=16).digest()


@dataclass(frozen=True)
class Seal:
    """What a writer vouches for. `payload_bytes` and `checksum` are those of this rank's share of this piece;
    `layout_digest` is what `layout_in` says."""

    layout_digest: bytes
    object_digest: bytes
    rank: int
    piece: int
    pieces: int
    payload_bytes: int
    checksum: int
    nonce: bytes

    def encode(self) -> bytes:
        """128 bytes."""
        body = _BODY.pack(
            MAGIC,
            VERSION,
            self.rank,
            self.piece,
            self.pieces,
            self.layout_digest,
            self.object_digest,
            self.payload_bytes,
            self.checksum,
            self.nonce,
        ) + bytes(_PADDING)
        return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))


def decode_seal(raw: bytes) -> Seal:
    """The seal in these 128 bytes.

    Raises:
        ServerError: they are no seal of this version.
    """
    if len(raw) != SEAL_BYTES:
        raise ServerError(f"a seal has {SEAL_BYTES} bytes, not {len(raw)}")
    body, check = raw[: -_CHECK.size], raw[-_CHECK.size :]
    magic, version, rank, piece, pieces, layout, digest, payload_bytes, checksum, nonce = _BODY.unpack_from(body)
    if magic != MAGIC or version != VERSION:
        raise ServerError("no seal: the object was never completed, or by something else")
    if _CHECK.unpack(check)[0] != xxhash.xxh3_64_intdigest(body):
        raise ServerError("the seal itself is damaged")
    return Seal(layout, digest, rank, piece, pieces, payload_bytes, checksum, nonce)


def check_seal(
    raw: bytes,
    *,
    layout_digest: bytes,
    object_digest: bytes,
    rank: int,
    piece: int,
    pieces: int,
    payload_bytes: int,
) -> Seal:
    """The seal, if it is the one that was promised.

    Raises:
        ServerError: it is another object's, another layout's, another piece's or another rank's, or none.
    """
    seal = decode_seal(raw)
    expected = Seal(
        layout_digest, object_digest, rank, piece, pieces, payload_bytes, checksum=seal.checksum, nonce=seal.nonce
    )
    if seal != expected:
        differs = [name for name in Seal.__dataclass_fields__ if getattr(seal, name) != getattr(expected, name)]
        raise ServerError(f"the slot holds another object: {', '.join(differs)}")
    return seal
