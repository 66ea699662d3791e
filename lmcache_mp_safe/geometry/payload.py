"""What is where inside an object.

All objects of a model have one size, because the server allocates first-fit and two sizes in one pool end in holes
that fit nothing. An object is the concatenation of one slice for each rank:

    object   [ slice of rank 0            ][ slice of rank 1            ] ...
    slice    [ payload ........ | unused .. | seal, the last 128 bytes   ]     4 KiB aligned

The payload of a rank is, for each group in the object, for each layer, for each page segment, for each block in order,
the raw page bytes. A payload that is larger than a slice's capacity is cut into pieces, each an object of its own with
its own seals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SEAL_BYTES = 128
SLICE_ALIGNMENT_BYTES = 4096


def align_up(size: int, alignment: int) -> int:
    return -(-size // alignment) * alignment


@dataclass(frozen=True)
class Slice:
    """One rank's part of an object; `offset` and `size` in bytes within the object."""

    offset: int
    size: int

    @property
    def capacity(self) -> int:
        return self.size - SEAL_BYTES

    @property
    def seal_offset(self) -> int:
        return self.offset + self.capacity


@dataclass(frozen=True)
class ObjectLayout:
    """Slices of one object, and how many pieces a payload needs."""

    slices: tuple[Slice, ...]

    @classmethod
    def for_payload(cls, rank_payload_bytes: Sequence[int]) -> ObjectLayout:
        """The smallest object that holds this payload (one size a rank, bytes) in one piece."""
        slices: list[Slice] = []
        offset = 0
        for payload_bytes in rank_payload_bytes:
            size = align_up(payload_bytes + SEAL_BYTES, SLICE_ALIGNMENT_BYTES)
            slices.append(Slice(offset, size))
            offset += size
        return cls(tuple(slices))

    @property
    def object_bytes(self) -> int:
        last = self.slices[-1]
        return last.offset + last.size

    def pieces(self, rank_payload_bytes: Sequence[int]) -> int:
        """Pieces that a payload of these sizes needs: at least one, and the same number for every rank."""
        return max(1, *(-(-size // part.capacity) for size, part in zip(rank_payload_bytes, self.slices, strict=True)))


def piece_bytes(payload_bytes: int, capacity: int, piece: int) -> int:
    """Payload bytes of a rank that lie in this piece."""
    return max(0, min(capacity, payload_bytes - piece * capacity))
