"""Certified source blocks: what is stored is what vLLM's own prefix cache would serve for that prefix, or nothing.

A certificate names blocks by prefix hash, not by a request's block table. The table of a hybrid model holds null,
scratch and moved blocks in places where a position would suggest a state; a hash cannot lie that way.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lmcache_mp_safe.errors import LocalError
from lmcache_mp_safe.geometry.groups import Columns, ModelGeometry


class Block(Protocol):
    """A block of vLLM's pool."""

    block_id: int
    ref_cnt: int
    is_null: bool

    @property
    def block_hash(self) -> Any: ...


class BlockPool(Protocol):
    """vLLM's pool as `compat/requests.py` shows it."""

    @property
    def total_blocks(self) -> int: ...
    def find_all(self, block_hashes: Sequence[Any], group: int) -> Sequence[Any] | None: ...
    def pin(self, blocks: Sequence[Any]) -> None: ...
    def unpin(self, blocks: Sequence[Any]) -> None: ...


class HashSource(Protocol):
    """Gives the prefix hashes of a request."""

    def block_hashes(self, columns: range, block_tokens: int) -> Sequence[Any] | None: ...


@dataclass(frozen=True)
class Pages:
    """An object's certified blocks of one group: the prefix hashes that name them, and each block's own hash then."""

    prefix_hashes: Sequence[Any]
    blocks: Sequence[Block]
    block_hashes: Sequence[Any]


@dataclass(frozen=True)
class Certificate:
    """The blocks of one object, by group, in payload order."""

    groups: tuple[Pages, ...]

    @property
    def blocks(self) -> list[Block]:
        return [block for pages in self.groups for block in pages.blocks]

    @property
    def block_ids(self) -> tuple[tuple[int, ...], ...]:
        return tuple([tuple([block.block_id for block in pages.blocks]) for pages in self.groups])

    @property
    def moved(self) -> bool:
        """Whether vLLM has taken the hash away from a block since, so that its owner may write into it again."""
        return any([block.block_hash for block in pages.blocks] != pages.block_hashes for pages in self.groups)


_NO_PAGES = Pages((), (), [])


def certify(pool: BlockPool, source: HashSource, geometry: ModelGeometry, columns: Columns) -> Certificate | None:
    """The certified blocks of an object with these columns, or None if vLLM would not serve one of them."""
    groups = [_NO_PAGES] * len(columns)
    for group in geometry.rarest_first:
        part = columns[group]
        if not part:
            continue
        hashes = source.block_hashes(part, geometry.groups[group].block_tokens)
        blocks = None if hashes is None else pool.find_all(hashes, group)
        if hashes is None or blocks is None or any(block.is_null for block in blocks):
            return None
        groups[group] = Pages(hashes, blocks, [block.block_hash for block in blocks])
    return Certificate(tuple(groups))


def still_holds(pool: BlockPool, certificate: Certificate) -> bool:
    """Whether a second look finds the very same blocks. An id is never swapped inside a job."""
    for group, pages in enumerate(certificate.groups):
        found = pool.find_all(pages.prefix_hashes, group)
        if found is None or not all(map(operator.is_, found, pages.blocks)):
            return False
    return True


class Pins:
    """References on certified blocks, and the budget for them.

    Invariant: `held` is the sum of the pages of all certificates that were pinned and not yet unpinned.
    """

    def __init__(self, pool: BlockPool, fraction: float) -> None:
        self._pool = pool
        self._budget = max(1, int(pool.total_blocks * fraction))
        self.held = 0

    def try_pin(self, certificate: Certificate) -> bool:
        """Pin all blocks of the certificate, or none when the budget is used up.

        An idle budget admits one object of any size: otherwise a small pool could never store a large one.
        """
        blocks = certificate.blocks
        if self.held and self.held + len(blocks) > self._budget:
            return False
        self._pool.pin(blocks)
        self.held += len(blocks)
        return True

    def unpin(self, certificate: Certificate) -> None:
        blocks = certificate.blocks
        if len(blocks) > self.held:
            raise LocalError("unpinned more blocks than were pinned")
        self._pool.unpin(blocks)
        self.held -= len(blocks)
