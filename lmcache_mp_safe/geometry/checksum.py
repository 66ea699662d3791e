"""The payload checksum: one that a GPU computes in parallel and a CPU computes with a library.

A payload is cut into tiles of 16 KiB, the last one filled up with zeros. Each tile has its XXH3-64; the checksum is the
XXH3-64 over those, in order, as little-endian words. Tiles are counted in the payload, so the checksum does not depend
on how the payload is spread over pages. The seal holds the payload's length, so the zeros are no ambiguity.
"""

from __future__ import annotations

import numpy as np
import xxhash
from numpy.typing import NDArray

TILE_BYTES = 16 << 10


def tile_count(payload_bytes: int) -> int:
    return -(-payload_bytes // TILE_BYTES)


def combine(tile_digests: NDArray[np.uint64]) -> int:
    """The checksum of a payload whose tiles have these digests."""
    return xxhash.xxh3_64_intdigest(tile_digests.astype("<u8", copy=False).tobytes())


class PayloadChecksum:
    """The checksum of a payload that comes in parts: the reference for every other way to compute it."""

    def __init__(self) -> None:
        self.tiles: list[int] = []  # digests of the tiles that are full
        self._tile = xxhash.xxh3_64()
        self._tile_bytes = 0

    def update(self, part: NDArray[np.uint8]) -> None:
        """Append a contiguous part."""
        done = 0
        while done < len(part):
            taken = part[done : done + TILE_BYTES - self._tile_bytes]
            self._tile.update(taken.data)
            self._tile_bytes += len(taken)
            done += len(taken)
            if self._tile_bytes == TILE_BYTES:
                self._end_tile()

    def intdigest(self) -> int:
        """The checksum. Nothing may be appended afterwards."""
        if self._tile_bytes:
            self._tile.update(bytes(TILE_BYTES - self._tile_bytes))
            self._end_tile()
        return combine(np.array(self.tiles, dtype=np.uint64))

    def _end_tile(self) -> None:
        self.tiles.append(self._tile.intdigest())
        self._tile.reset()
        self._tile_bytes = 0
