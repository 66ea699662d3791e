"""From a request to the objects of its prefix: names, columns, pieces, and whether seals in given slots are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lmcache_mp_safe.contract import RankLayout
from lmcache_mp_safe.errors import ServerError
from lmcache_mp_safe.geometry.groups import Columns, ModelGeometry, payload_bytes
from lmcache_mp_safe.geometry.payload import SEAL_BYTES, ObjectLayout, piece_bytes
from lmcache_mp_safe.geometry.seal import check_seal, layout_in
from lmcache_mp_safe.identity import PrefixDigests, piece_digests


class PoolReader(Protocol):
    """The server's pool, to read from; bounds are checked."""

    def read(self, offset: int, length: int) -> bytes: ...


@dataclass(frozen=True)
class ObjectName:
    """One object of a prefix.

    Attributes:
        digest: names the content and is written into the seal.
        columns: block columns per group that it holds.
        pieces: digests of the server objects it consists of; a chunk object is its own single piece.
    """

    digest: bytes
    columns: Columns
    pieces: tuple[bytes, ...]


class ModelObjects:
    """The objects of one model on these ranks: one object size for all of them."""

    def __init__(self, geometry: ModelGeometry, ranks: Sequence[RankLayout]) -> None:
        self.geometry = geometry
        self.ranks = tuple(ranks)
        largest = geometry.chunk_columns(0) if geometry.has_append_only else _deepest_boundary(geometry)
        self.layout = ObjectLayout.for_payload(self._rank_bytes(largest))

    def _rank_bytes(self, columns: Columns) -> list[int]:
        return [payload_bytes(columns, rank.group_page_bytes) for rank in self.ranks]

    def payload_bytes(self, name: ObjectName) -> int:
        """Bytes of the pages in an object, all ranks together."""
        return sum(self._rank_bytes(name.columns))

    def pieces_at(self, boundary: int) -> int:
        """Server objects that the boundary object for `boundary` takes."""
        return self.layout.pieces(self._rank_bytes(self.geometry.boundary_columns(boundary)))

    def chunk(self, digests: PrefixDigests, index: int) -> ObjectName:
        digest = digests.chunk(index)
        return ObjectName(digest, self.geometry.chunk_columns(index), (digest,))

    def boundary(self, digests: PrefixDigests, boundary: int) -> ObjectName:
        digest = digests.boundary(boundary)
        columns = self.geometry.boundary_columns(boundary)
        return ObjectName(digest, columns, piece_digests(digest, self.layout.pieces(self._rank_bytes(columns))))

    def check_seals(self, pool: PoolReader, namespace: str, name: ObjectName, slots: Sequence[int]) -> None:
        """Read the seal of every rank in every piece.

        Raises:
            ServerError: a slot does not hold the sealed object of this name in this namespace.
        """
        for rank, part, payload in zip(self.ranks, self.layout.slices, self._rank_bytes(name.columns), strict=True):
            for piece, slot in enumerate(slots):
                raw = pool.read(slot + part.seal_offset, SEAL_BYTES)
                check_seal(
                    raw,
                    layout_digest=layout_in(namespace, rank.digest),
                    object_digest=name.digest,
                    rank=rank.rank,
                    piece=piece,
                    pieces=len(slots),
                    payload_bytes=piece_bytes(payload, part.capacity, piece),
                )

    def seals_are_right(self, pool: PoolReader, namespace: str, name: ObjectName, slots: Sequence[int]) -> bool:
        try:
            self.check_seals(pool, namespace, name, slots)
        except ServerError:
            return False
        return True


def _deepest_boundary(geometry: ModelGeometry) -> Columns:
    """Columns of the largest boundary object of a model without append-only groups."""
    span = max(group.span_tokens for group in geometry.groups) + geometry.block_tokens
    boundaries = range(geometry.block_tokens, span + 2 * geometry.block_tokens, geometry.block_tokens)
    return max((geometry.boundary_columns(b) for b in boundaries), key=lambda columns: sum(map(len, columns)))
