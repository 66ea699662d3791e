"""How a payload is copied: which runs go straight, which by the staging buffer, and in which rounds.

The copy engine moves long runs at the speed of the bus and starves on short ones. So runs that are shorter than
`direct_bytes` are gathered by a kernel into a staging buffer in device memory, where neighbours become one long run:

    piece       [ long ][ s1 ][ s2 ][ s3 ][ long ][ s4 ][ s5 ]
    straight      page                      page
    staged               [ s1 | s2 | s3 ]           [ s4 | s5 ]     one copy each between staging buffer and slot

A *round* is what fits into one of two staging buffers, so that one is gathered while the other is copied. It is part of
one piece and ends at a tile boundary of it, so that each can take the checksums of its own tiles.

This runs on the copy thread, beside the thread that runs the model and under the same interpreter lock: few calls, each
over the runs of all rounds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lmcache_mp_safe.geometry.checksum import TILE_BYTES
from lmcache_mp_safe.ops.device import Words

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]


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
    """A payload in order; arrays of shape (n,).

    Attributes:
        piece: the piece that a run is part of; never less than that of the run before.
        address: device address of a run, 0 for one that is not wanted.
        length: bytes, at least 1.
    """

    piece: Integers
    address: Integers
    length: Integers

    def __getitem__(self, part: slice) -> Runs:
        return Runs(self.piece[part], self.address[part], self.length[part])


@dataclass(frozen=True, slots=True)
class Round:
    """The bytes [begin, end) of one piece.

    Attributes:
        buffer: the staging buffer that it uses, 0 or 1; None if none.
        moves: shape (n, 3): page address, staging address, bytes.
        copies: shape (n, 3): device address, position in the slots (see `rounds`), bytes. In the order of the payload.
        pages: shape (n, 2): position behind `begin`, device address of the page, or the staging address of what is not
            wanted.
        staged: the same, with the staging address of everything that is staged.
    """

    piece: int
    begin: int
    end: int
    buffer: int | None
    moves: Words
    copies: Words
    pages: Words
    staged: Words


def portions(runs: Runs, size: int) -> Iterator[Runs]:
    """A payload in portions of whole pieces, of the fewest that have this many bytes: the bus is busy with one while
    the rounds of the next are computed."""
    done = np.cumsum(runs.length)
    begin, copied = 0, 0
    for end in (np.flatnonzero(np.diff(runs.piece, append=np.iinfo(np.int64).max)) + 1).tolist():
        if done[end - 1] - copied >= size or end == len(done):
            yield runs[begin:end]
            begin, copied = end, int(done[end - 1])


def rounds(runs: Runs, slots: Integers, buffers: tuple[int, int], limits: Limits, turn: int = 0) -> list[Round]:
    """The rounds of a payload, in order.

    Args:
        slots: where each piece lies: what is added to positions within the piece.
        buffers: addresses of the staging buffers, which take turns, that of `turn` first.
    """
    if not len(runs.length):
        return []
    stop = np.cumsum(runs.length)
    start = stop - runs.length
    first_runs = np.flatnonzero(np.concatenate([[True], runs.piece[1:] != runs.piece[:-1]]))
    pieces = _Pieces(runs.piece[first_runs].tolist(), [*start[first_runs].tolist(), int(stop[-1])])
    staged = _staged(runs, limits.direct_bytes)
    bounds = list(_bounds(pieces, start, staged, runs.length, limits))
    begins = np.array([begin for _, begin, _ in bounds])
    return _Cut.at(begins, runs, start, staged).rounds(pieces, bounds, slots, buffers, turn)


@dataclass(frozen=True)
class _Pieces:
    """Those that have runs: their numbers, and where in the payload they begin; and where the payload ends."""

    number: list[int]
    begin: list[int]


def _staged(runs: Runs, direct_bytes: int) -> Flags:
    """Short runs, unless they have no neighbour to be joined with; and what is not wanted, which has no page."""
    unwanted = runs.address == 0
    short = (runs.length < direct_bytes) | unwanted
    joined = short[1:] & short[:-1] & (runs.piece[1:] == runs.piece[:-1])
    found: Flags = unwanted.copy()
    found[1:] |= joined
    found[:-1] |= joined
    return found


def _bounds(
    pieces: _Pieces, start: Integers, staged: Flags, length: Integers, limits: Limits
) -> Iterator[tuple[int, int, int]]:
    """Index into `pieces`, and where in the payload a round begins and ends."""
    # One search instead of one a round; lists, as bisect is quicker than a call of numpy for a single number.
    run_start = start.tolist()
    staged_before = np.concatenate([[0], np.cumsum(np.where(staged, length, 0))]).tolist()
    for index, (begin, total) in enumerate(zip(pieces.begin[:-1], pieces.begin[1:], strict=True)):
        while begin < total:
            first = bisect_right(run_start, begin) - 1
            ends = [total, begin + limits.payload_bytes]
            if first + limits.runs < len(run_start):
                ends.append(run_start[first + limits.runs])
            used = staged_before[first] + (begin - run_start[first] if staged[first] else 0)
            budget = used + limits.staging_bytes
            full = bisect_right(staged_before, budget) - 1  # the run in which the buffer is full
            if full < len(run_start):
                ends.append(run_start[full] + budget - staged_before[full])
            end = min(ends)
            if end < total:
                end = begin + (end - begin) // TILE_BYTES * TILE_BYTES
            yield index, begin, end
            begin = end


@dataclass(frozen=True)
class _Cut:
    """Runs that are each part of one round.

    Attributes:
        first: of each round, its first run; and the number of runs.
        round: of each run, its round.
        start: position in the payload.
        address: 0 if it is not wanted.
    """

    begins: Integers
    first: Integers
    round: Integers
    start: Integers
    length: Integers
    address: Integers
    staged: Flags

    @classmethod
    def at(cls, begins: Integers, runs: Runs, start: Integers, staged: Flags) -> _Cut:
        length, address = runs.length, runs.address
        first = np.searchsorted(start, begins)
        if first[-1] == len(start) or (start[first] != begins).any():
            cut = np.union1d(start, begins)
            run = np.searchsorted(start, cut, side="right") - 1
            wanted = address[run] != 0
            address = np.where(wanted, address[run] + cut - start[run], 0)
            length = np.diff(cut, append=start[-1] + length[-1])
            start, staged = cut, staged[run]
            first = np.searchsorted(start, begins)
        counts = np.diff(first, append=len(start))
        return cls(
            begins, np.append(first, len(start)), np.arange(len(begins)).repeat(counts), start, length, address, staged
        )

    def rounds(
        self, pieces: _Pieces, bounds: list[tuple[int, int, int]], slots: Integers, buffers: tuple[int, int], turn: int
    ) -> list[Round]:
        position = self.start - self.begins[self.round]
        to_slot = np.array([slots[pieces.number[index]] - pieces.begin[index] for index, _, _ in bounds])
        host = self.start + to_slot[self.round]
        uses = np.logical_or.reduceat(self.staged, self.first[:-1])
        turns = (turn + np.cumsum(uses) - uses) & 1
        if uses.any():
            tables = self._tables(position, host, np.array(buffers)[turns])
        else:
            straight = _table(position, self.address)
            every = self.first.tolist()
            tables = _Tables(
                _NO_MOVES, [0] * len(every), _table(self.address, host, self.length), every, straight, straight
            )
        first, used, buffer = self.first.tolist(), uses.tolist(), turns.tolist()
        made: list[Round] = []
        for n, (index, begin, end) in enumerate(bounds):
            moves, copies, rows = (
                slice(starts[n], starts[n + 1]) for starts in (tables.first_move, tables.first_copy, first)
            )
            made.append(
                Round(
                    pieces.number[index],
                    begin - pieces.begin[index],
                    end - pieces.begin[index],
                    buffer[n] if used[n] else None,
                    moves=tables.moves[moves],
                    copies=tables.copies[copies],
                    pages=tables.pages[rows],
                    staged=tables.staged[rows],
                )
            )
        return made

    def _tables(self, position: Integers, host: Integers, buffer: Integers) -> _Tables:
        """Tables with moves; `buffer` is the address of each round's staging buffer."""
        buffered = self.length * self.staged
        before = np.cumsum(buffered) - buffered
        staging = before + (buffer - before[self.first[:-1]])[self.round]
        device = np.where(self.staged, staging, self.address)
        wanted = self.address != 0
        moved = np.flatnonzero(self.staged & wanted)
        joined = self.staged[1:] & self.staged[:-1]  # neighbours in buffer and slot
        joined[self.first[1:-1] - 1] = False
        copied = np.concatenate([[0], np.flatnonzero(~joined) + 1])
        return _Tables(
            _table(self.address[moved], staging[moved], self.length[moved]),
            np.searchsorted(moved, self.first).tolist(),
            _table(device[copied], host[copied], np.add.reduceat(self.length, copied)),
            np.searchsorted(copied, self.first).tolist(),
            _table(position, np.where(wanted, self.address, staging)),
            _table(position, device),
        )


@dataclass(frozen=True)
class _Tables:
    """Those of `Round`, of all rounds; `first_`: of each round, its first row; and the number of rows."""

    moves: Words
    first_move: list[int]
    copies: Words
    first_copy: list[int]
    pages: Words
    staged: Words


def _table(*columns: Integers) -> Words:
    table = np.empty((len(columns[0]), len(columns)), np.uint64)
    for index, column in enumerate(columns):
        table[:, index] = column
    return table


_NO_MOVES: Words = np.empty((0, 3), np.uint64)
