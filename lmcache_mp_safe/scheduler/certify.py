"""Certified source blocks: what is stored is what vLLM's own prefix cache would serve for that prefix, or nothing.

A certificate names blocks by prefix hash, not by a request's block table. The table of a hybrid model holds null,
scratch and moved blocks in places where a position would suggest a state; a hash cannot lie that way.
"""

from __future__ import annotations

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
    def find(self, block_hash: Any, group: int) -> Any | None: ...
    def pin(self, blocks: Sequence[Any]) -> None: ...
    def unpin(self, blocks: Sequence[Any]) -> None: ...


class HashSource(Protocol):
    """Gives the prefix hashes of a request."""

    def block_hash(self, column: int, block_tokens: int) -> Any | None: ...


@dataclass(frozen=True)
class Page:
    """One certified block: the prefix hash that names it, and the block's own hash when it was certified."""

    group: int
    prefix_hash: Any
    block: Block
    block_hash: Any


@dataclass(frozen=True)
class Certificate:
    """The blocks of one object, group by group in payload order."""

    pages: tuple[Page, ...]
    num_groups: int

    @property
    def block_ids(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(page.block.block_id for page in self.pages if page.group == group) for group in range(self.num_groups)
        )

    @property
    def moved(self) -> bool:
        """Whether vLLM has taken the hash away from a block since, so that its owner may write into it again."""
        return any(page.block.block_hash != page.block_hash for page in self.pages)


def certify(pool: BlockPool, source: HashSource, geometry: ModelGeometry, columns: Columns) -> Certificate | None:
    """The certified blocks of an object with these columns, or None if vLLM would not serve one of them."""
    pages: list[Page] = []
    for group, part in enumerate(columns):
        block_tokens = geometry.groups[group].block_tokens
        for column in part:
            prefix_hash = source.block_hash(column, block_tokens)
            block = None if prefix_hash is None else pool.find(prefix_hash, group)
            if block is None or block.is_null:
                return None
            pages.append(Page(group, prefix_hash, block, block.block_hash))
    return Certificate(tuple(pages), len(columns))


def still_holds(pool: BlockPool, certificate: Certificate) -> bool:
    """Whether a second look finds the very same blocks. An id is never swapped inside a job."""
    return all(pool.find(page.prefix_hash, page.group) is page.block for page in certificate.pages)


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
        size = len(certificate.pages)
        if self.held and self.held + size > self._budget:
            return False
        self._pool.pin([page.block for page in certificate.pages])
        self.held += size
        return True

    def unpin(self, certificate: Certificate) -> None:
        if len(certificate.pages) > self.held:
            raise LocalError("unpinned more blocks than were pinned")
        self._pool.unpin([page.block for page in certificate.pages])
        self.held -= len(certificate.pages)
