"""From block ids to byte runs: which bytes of the KV cache lie where in the payload of an object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from lmcache_mp_safe.contract import SKIP
from lmcache_mp_safe.errors import LocalError
from lmcache_mp_safe.geometry.pages import PageLayout

Integers = NDArray[np.int64]


class Span(NamedTuple):
    """A run of bytes that is contiguous in the KV cache and in the payload.

    Attributes:
        buffer, page_offset: where it starts in the KV cache; `page_offset` is SKIP for pages that are not wanted.
        piece, piece_offset: where it starts in the payload.
        length: bytes.
    """

    buffer: int
    page_offset: int
    piece: int
    piece_offset: int
    length: int


@dataclass(frozen=True)
class Spans:
    """Spans of a payload in order, one array of shape (n,) a field of `Span`: an object can have thousands of them, and
    they are computed while the engine waits for the interpreter."""

    buffer: Integers
    page_offset: Integers
    piece: Integers
    piece_offset: Integers
    length: Integers

    @classmethod
    def of(cls, spans: Sequence[Span]) -> Self:
        columns = np.array(spans, dtype=np.int64).reshape(len(spans), len(Span._fields)).T
        return cls(*columns)

    @classmethod
    def joined(cls, payloads: Sequence[tuple[Self, int]]) -> Self:
        """Several payloads and how many pieces each has, as one payload in as many pieces as all of them."""
        before = np.cumsum([0, *(pieces for _, pieces in payloads)])[:-1]
        columns = {field.name: [getattr(spans, field.name) for spans, _ in payloads] for field in fields(cls)}
        columns["piece"] = [piece + offset for piece, offset in zip(columns["piece"], before, strict=True)]
        return cls(**{name: np.concatenate(parts) for name, parts in columns.items()})

    def __len__(self) -> int:
        return len(self.length)

    def __iter__(self) -> Iterator[Span]:
        return map(Span._make, zip(*(getattr(self, field.name).tolist() for field in fields(self)), strict=True))


def spans(blocks: Sequence[Sequence[int]], layout: PageLayout, capacity: int) -> Spans:
    """The payload of an object in order, in the longest runs: group, layer, segment, block.

    Args:
        blocks: block ids per group; SKIP for a page that is not wanted.
        capacity: payload bytes in one piece.

    Raises:
        LocalError: a piece has no room for payload.
    """
    if capacity <= 0:
        raise LocalError(f"a slice with room for {capacity} payload bytes can hold no payload")
    buffer, offset, length = _merged(*_pages(blocks, layout))
    return _cut(buffer, offset, length, capacity)


def _pages(blocks: Sequence[Sequence[int]], layout: PageLayout) -> tuple[Integers, Integers, Integers]:
    """Buffer, offset or SKIP, and length of every page segment in payload order."""
    columns: list[tuple[Integers, Integers, Integers]] = []
    for ids, segments in zip(blocks, layout.segment_tables, strict=True):
        wanted = np.asarray(ids, dtype=np.int64)
        start = segments.offset[:, None] + wanted * segments.stride[:, None]
        start[:, wanted == SKIP] = SKIP
        repeat = len(wanted)
        columns.append((segments.buffer.repeat(repeat), start.ravel(), segments.length.repeat(repeat)))
    buffer, offset, length = zip(*columns, strict=True)
    return np.concatenate(buffer), np.concatenate(offset), np.concatenate(length)


def _merged(buffer: Integers, offset: Integers, length: Integers) -> tuple[Integers, Integers, Integers]:
    """Neighbours in the payload that are neighbours in memory, or are both not wanted, become one run."""
    if not len(length):
        return buffer, offset, length
    skipped = offset == SKIP
    adjacent = ~skipped[:-1] & ~skipped[1:] & (offset[:-1] + length[:-1] == offset[1:])
    continues = (skipped[:-1] & skipped[1:]) | (adjacent & (buffer[:-1] == buffer[1:]))
    first = np.concatenate([[0], np.flatnonzero(~continues) + 1])
    # Where a run is not wanted, its buffer means nothing.
    return np.where(skipped[first], 0, buffer[first]), offset[first], np.add.reduceat(length, first)


def _cut(buffer: Integers, offset: Integers, length: Integers, capacity: int) -> Spans:
    """Cut the payload into pieces."""
    end = np.cumsum(length)
    total = int(end[-1]) if len(end) else 0
    start = end - length
    if total <= capacity:
        return Spans(buffer, offset, np.zeros(len(start), np.int64), start, length)
    cut = np.union1d(start, np.arange(0, total, capacity, dtype=np.int64))
    run = np.searchsorted(start, cut, side="right") - 1
    into = cut - start[run]
    return Spans(
        buffer=buffer[run],
        page_offset=np.where(offset[run] == SKIP, SKIP, offset[run] + into),
        piece=cut // capacity,
        piece_offset=cut % capacity,
        length=np.diff(cut, append=total),
    )
