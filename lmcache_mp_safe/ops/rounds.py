"""How one piece of a payload is copied: which runs go straight, which by the staging buffer, and in which rounds.

The copy engine moves long runs at the speed of the bus and starves on short ones. So runs that are shorter than
`direct_bytes` are gathered by a kernel into a staging buffer in device memory, where neighbours become one long run:

    payload     [ long ][ s1 ][ s2 ][ s3 ][ long ][ s4 ][ s5 ]
    straight      page                      page
    staged               [ s1 | s2 | s3 ]           [ s4 | s5 ]     one copy each between staging buffer and slot

A *round* is what fits into one of two staging buffers, so that one is gathered while the other is copied. Rounds end at
tile boundaries, so that each can take the checksums of its own tiles.

This runs on the copy thread, beside the thread that runs the model and under the same interpreter lock: few calls, each
over all runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lmcache_mp_safe.geometry.checksum import TILE_BYTES
from lmcache_mp_safe.ops.device import Words

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Limits:
    """Of one round. Each must have room for one tile at least, in runs of one byte.

    Attributes:
        staging_bytes: size of the staging buffer.
        runs: rows in a table.
        payload_bytes: payload of a round.
        direct_bytes: the shortest run that is copied straight.
    """

    staging_bytes: int
    runs: int
    payload_bytes: int
    direct_bytes: int


@dataclass(frozen=True)
class Runs:
    """A piece's payload in order; arrays of shape (n,).

    Attributes:
        address: device address of a run, 0 for one that is not wanted.
        length: bytes.
    """

    address: Integers
    length: Integers


@dataclass(frozen=True)
class Round:
    """The payload's bytes [begin, end).

    Attributes:
        buffer: the staging buffer that it uses, 0 or 1; None if none.
        moves: shape (n, 3): page address, staging address, bytes.
        copies: shape (n, 3): device address, position behind `begin` in the slot, bytes. In the order of the payload.
        pages: shape (n, 2): position behind `begin`, device address of the page, or the staging address of what is not
            wanted.
        staged: the same, with the staging address of everything that is staged.
    """

    begin: int
    end: int
    buffer: int | None
    moves: Words
    copies: Words
    pages: Words
    staged: Words


def rounds(runs: Runs, buffers: tuple[int, int], limits: Limits, turn: int = 0) -> Iterator[Round]:
    """The rounds of one piece, in order; `buffers` are the addresses of the staging buffers, which take turns, that of
    `turn` first."""
    end = np.cumsum(runs.length)
    total = int(end[-1]) if len(end) else 0
    start = end - runs.length
    staged = _staged(runs, limits.direct_bytes)
    staged_before = np.concatenate([[0], np.cumsum(np.where(staged, runs.length, 0))])
    begin = 0
    while begin < total:
        limit = _round_end(begin, total, start, staged, staged_before, limits)
        made = _round(begin, limit, runs.address, start, end, staged, buffers[turn], turn)
        yield made
        begin, turn = limit, turn if made.buffer is None else 1 - turn


def _staged(runs: Runs, direct_bytes: int) -> NDArray[np.bool_]:
    """Short runs, unless they have no neighbour to be joined with; and what is not wanted, which has no page."""
    short = (runs.length < direct_bytes) | (runs.address == 0)
    before, after = np.concatenate([[False], short[:-1]]), np.concatenate([short[1:], [False]])
    found: NDArray[np.bool_] = (short & (before | after)) | (runs.address == 0)
    return found


def _round_end(
    begin: int, total: int, start: Integers, staged: NDArray[np.bool_], staged_before: Integers, limits: Limits
) -> int:
    first = int(np.searchsorted(start, begin, side="right")) - 1
    ends = [total, begin + limits.payload_bytes]
    if first + limits.runs < len(start):
        ends.append(int(start[first + limits.runs]))
    used = int(staged_before[first]) + (begin - int(start[first]) if staged[first] else 0)
    budget = used + limits.staging_bytes
    full = int(np.searchsorted(staged_before, budget, side="right")) - 1  # the run in which the buffer is full
    if full < len(start):
        ends.append(int(start[full]) + budget - int(staged_before[full]))
    end = min(ends)
    return end if end == total else begin + (end - begin) // TILE_BYTES * TILE_BYTES


def _round(
    begin: int,
    end: int,
    address: Integers,
    run_start: Integers,
    run_end: Integers,
    staged_runs: NDArray[np.bool_],
    staging_address: int,
    turn: int,
) -> Round:
    part = slice(int(np.searchsorted(run_end, begin, side="right")), int(np.searchsorted(run_start, end)))
    start, stop = np.maximum(run_start[part], begin), np.minimum(run_end[part], end)
    length, staged = stop - start, staged_runs[part]
    page = address[part] + start - run_start[part]
    position = start - begin
    if not staged.any():
        straight = _table(position, page)
        return Round(begin, end, None, _NO_MOVES, _table(page, position, length), straight, straight)
    wanted = address[part] != 0
    buffered = length * staged
    staging = staging_address + np.cumsum(buffered) - buffered
    device = np.where(staged, staging, page)
    moved = staged & wanted
    first = np.flatnonzero(~(staged[:-1] & staged[1:])) + 1  # others join their neighbour in buffer and slot
    first = np.concatenate([[0], first])
    return Round(
        begin,
        end,
        turn,
        moves=_table(page[moved], staging[moved], length[moved]),
        copies=_table(device[first], position[first], np.add.reduceat(length, first)),
        pages=_table(position, np.where(wanted, page, staging)),
        staged=_table(position, device),
    )


def _table(*columns: Integers) -> Words:
    table = np.empty((len(columns[0]), len(columns)), np.uint64)
    for index, column in enumerate(columns):
        table[:, index] = column
    return table


_NO_MOVES: Words = np.empty((0, 3), np.uint64)
