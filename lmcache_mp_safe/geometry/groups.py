"""Which KV cache groups a model has, and which blocks of them an object holds. Pure arithmetic on tokens and columns.

A *column* is an index into a request's block table of one group: column c of a group with `block_tokens` tokens a block
covers tokens [c * block_tokens, (c + 1) * block_tokens).

One request's token axis, chunk length C, resuming at boundary b inside chunk 2:

    0            C            2C      b    3C
    |  chunk 0   |  chunk 1   |  tail |
    append-only pages of [0, C), [C, 2C): one chunk object each
    the boundary object for b: append-only pages of the tail [2C, b) and, for every boundary group, what is needed to
    compute token b: the state page after b tokens, or the pages that b's window still sees
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from lmcache_mp_safe.geometry.payload import align_up


class GroupKind(enum.Enum):
    """What has to be kept of a group to resume at a boundary."""

    APPEND_ONLY = "append-only"  # every page up to the boundary; a full page never changes
    RECURRENT = "recurrent"  # the one state page after the boundary's last token
    WINDOW = "window"  # the pages that the next token's window still covers
    CHUNKED_LOCAL = "chunked-local"  # the pages of the local attention chunk that the boundary lies in
    IGNORED = "ignored"  # scratch that vLLM's prefix cache does not serve either


@dataclass(frozen=True)
class Group:
    """One KV cache group.

    Attributes:
        block_tokens: tokens that one block of this group covers.
        span_tokens: WINDOW: tokens that the next token sees, itself included, plus what vLLM retains beyond that;
            CHUNKED_LOCAL: length of a local attention chunk; else 0.
    """

    kind: GroupKind
    block_tokens: int
    span_tokens: int = 0

    @property
    def is_boundary(self) -> bool:
        return self.kind in (GroupKind.RECURRENT, GroupKind.WINDOW, GroupKind.CHUNKED_LOCAL)

    def columns_at(self, boundary: int) -> range:
        """Columns that a boundary object holds of this boundary group.

        The first column is vLLM's own arithmetic: `get_num_skipped_tokens(boundary) // block_size` in
        `v1/core/single_type_kv_cache_manager.py`.
        """
        end = boundary // self.block_tokens
        if self.kind is GroupKind.RECURRENT:
            return range(end - 1, end)
        if self.kind is GroupKind.WINDOW:
            first_needed_token = max(0, boundary - self.span_tokens + 1)
        else:
            first_needed_token = boundary // self.span_tokens * self.span_tokens
        return range(first_needed_token // self.block_tokens, end)


Columns = tuple[range, ...]  # one range of columns per group; empty where the group is not in the object
_NO_COLUMNS = range(0)


@dataclass(frozen=True)
class ModelGeometry:
    """All groups of a model, its scheduler block and its chunk length, in tokens.

    Attributes:
        block_tokens: vLLM's scheduler block: prefix-cache hits end on multiples of it.
        chunk_tokens: a multiple of `block_tokens`.
    """

    groups: tuple[Group, ...]
    block_tokens: int
    chunk_tokens: int

    @classmethod
    def of(cls, groups: Sequence[Group], min_chunk_tokens: int) -> ModelGeometry:
        """Geometry with the smallest chunk that is a multiple of the scheduler block and not below the minimum."""
        used = [group for group in groups if group.kind is not GroupKind.IGNORED]
        block_tokens = math.lcm(*(group.block_tokens for group in used))
        return cls(tuple(groups), block_tokens, align_up(min_chunk_tokens, block_tokens))

    @cached_property
    def has_append_only(self) -> bool:
        return any(group.kind is GroupKind.APPEND_ONLY for group in self.groups)

    @cached_property
    def has_boundary_groups(self) -> bool:
        return any(group.is_boundary for group in self.groups)

    @cached_property
    def is_recurrent(self) -> bool:
        return any(group.kind is GroupKind.RECURRENT for group in self.groups)

    def chunk_columns(self, chunk: int) -> Columns:
        """Columns in the chunk object for tokens [chunk * C, (chunk + 1) * C)."""
        return tuple(self._append_only_columns(chunk * self.chunk_tokens, (chunk + 1) * self.chunk_tokens))

    def boundary_columns(self, boundary: int) -> Columns:
        """Columns in the boundary object for `boundary`, a multiple of the scheduler block."""
        columns = self._append_only_columns(boundary // self.chunk_tokens * self.chunk_tokens, boundary)
        for group in self._boundary_groups:
            columns[group] = self.groups[group].columns_at(boundary)
        return tuple(columns)

    @cached_property
    def rarest_first(self) -> tuple[int, ...]:
        """Groups in the order in which to look for their pages: most boundaries have no state."""
        others = [group for group in range(len(self.groups)) if group not in self._boundary_groups]
        return (*self._boundary_groups, *others)

    def needs_boundary_object(self, boundary: int) -> bool:
        """Whether chunk objects alone do not suffice to resume at this boundary."""
        return self.is_recurrent or any(self.boundary_columns(boundary))

    @cached_property
    def _boundary_groups(self) -> tuple[int, ...]:
        return tuple(index for index, group in enumerate(self.groups) if group.is_boundary)

    @cached_property
    def _append_only_tokens(self) -> tuple[int, ...]:
        """Tokens of a block of each group; 0 for a group that is not append-only."""
        append_only = GroupKind.APPEND_ONLY
        return tuple(group.block_tokens if group.kind is append_only else 0 for group in self.groups)

    def _append_only_columns(self, start: int, end: int) -> list[range]:
        return [range(start // tokens, end // tokens) if tokens else _NO_COLUMNS for tokens in self._append_only_tokens]


def payload_bytes(columns: Columns, group_page_bytes: Sequence[int]) -> int:
    """Bytes that one rank's share of an object with these columns takes."""
    return sum(len(part) * page for part, page in zip(columns, group_page_bytes, strict=True))
