"""From block ids to byte runs: which bytes of the KV cache lie where in the payload of an object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lmcache_mp_safe.contract import SKIP
from lmcache_mp_safe.errors import LocalError
from lmcache_mp_safe.geometry.pages import PageLayout


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


def spans(blocks: Sequence[Sequence[int]], layout: PageLayout, capacity: int) -> list[Span]:
    """The payload of an object in order, in the longest runs: group, layer, segment, block.

    Args:
        blocks: block ids per group; SKIP for a page that is not wanted.
        capacity: payload bytes in one piece.

    Raises:
        LocalError: a piece has no room for payload.
    """
    if capacity <= 0:
        raise LocalError(f"a slice with room for {capacity} payload bytes can hold no payload")
    found: list[Span] = []
    for span in _cut(_pages(blocks, layout), capacity):
        if found and _continues(found[-1], span):
            found[-1] = found[-1]._replace(length=found[-1].length + span.length)
        else:
            found.append(span)
    return found


def _pages(blocks: Sequence[Sequence[int]], layout: PageLayout) -> Iterator[tuple[int, int, int]]:
    """(buffer, offset or SKIP, length) of every page segment in payload order."""
    for ids, layers in zip(blocks, layout.groups, strict=True):
        for layer in layers:
            for segment in layer.segments:
                for block in ids:
                    offset = SKIP if block == SKIP else segment.offset + block * segment.stride
                    yield segment.buffer, offset, segment.length


def _cut(pages: Iterator[tuple[int, int, int]], capacity: int) -> Iterator[Span]:
    """Cut the payload into pieces."""
    position = 0
    for buffer, start, total in pages:
        done = 0
        while done < total:
            piece, piece_offset = divmod(position, capacity)
            length = min(total - done, capacity - piece_offset)
            yield Span(buffer, SKIP if start == SKIP else start + done, piece, piece_offset, length)
            done += length
            position += length


def _continues(before: Span, after: Span) -> bool:
    if before.piece != after.piece:
        return False
    if SKIP in (before.page_offset, after.page_offset):
        return before.page_offset == after.page_offset
    return before.buffer == after.buffer and before.page_offset + before.length == after.page_offset
