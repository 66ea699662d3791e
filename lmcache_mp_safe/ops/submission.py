"""How copies become commands for a device, and the device memory that they take turns with.

Each direction has a stream for the copy engine and one for kernels, so that the checksums of one object and the
gathering of the next run while bytes are on the bus:

    store   kernels  | wait fence | tables | gather -> buffer | checksums of the pages ......|
            copies   | wait fence | wait gather | pages and buffer -> slot                   | event
    load    copies   | wait fence | tables | slot -> pages and buffer |
            kernels  | wait fence | wait copies | buffer -> pages | checksums of the pages | event

A load's kernels wait for its copies, so nothing of a later load that needs the copy engine may stand behind them: its
tables go with its copies, and digests are written to the host by the kernel itself.
"""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lmcache_mp_safe.geometry.checksum import TILE_BYTES
from lmcache_mp_safe.ops.device import (
    Bytes,
    Command,
    Copy,
    Device,
    DeviceMemory,
    Digest,
    Event,
    Move,
    Record,
    Stream,
    Wait,
    Words,
)
from lmcache_mp_safe.ops.host_blocks import HostBlock, HostBlocks
from lmcache_mp_safe.ops.rounds import Limits, Round

_TABLE_RUNS = 32 << 10  # more than a tile has bytes
_TABLE_BYTES = _TABLE_RUNS * 5 * 8
_ROUND_BYTES = 1 << 30
_GROUP_BYTES = 128 << 20  # keeps the bus busy while the next group is put together


class Lane:
    """One direction: its streams, and the device memory that its copies use one after the other.

    Attributes:
        group_bytes: payload that is submitted at once.
        buffer_free: when a staging buffer may be written again.
        handed_over: takes a round from one stream to the other.
    """

    def __init__(self, device: Device, buffer_bytes: int, direct_bytes: int) -> None:
        self.group_bytes = _GROUP_BYTES
        self.limits = Limits(buffer_bytes, _TABLE_RUNS, _ROUND_BYTES, direct_bytes)
        self.copies: Stream = device.side_stream()
        self.kernels: Stream = device.side_stream()
        self.buffers: list[DeviceMemory] = [device.device_memory(buffer_bytes) for _ in range(2)]
        self.buffer_free = [device.event() for _ in range(2)]
        self.tables = [_TableMemory(device.device_memory(_TABLE_BYTES), device.event()) for _ in range(2)]
        self.handed_over = device.event()
        self.host = HostBlocks(device.pinned_memory)
        self._in_flight: deque[tuple[Event, list[HostBlock]]] = deque()

    def hold(self, memory: list[HostBlock], until: Event) -> None:
        """Keep host memory that the device still reads or writes; let go of what it is done with."""
        while self._in_flight and self._in_flight[0][0].done():
            self._in_flight.popleft()
        self._in_flight.append((until, memory))

    @property
    def addresses(self) -> tuple[int, int]:
        return self.buffers[0].address, self.buffers[1].address

    def synchronize(self) -> None:
        self.copies.synchronize()
        self.kernels.synchronize()


class _TableMemory(NamedTuple):
    memory: DeviceMemory
    free: Event


@dataclass(frozen=True)
class Part:
    """A round, ready to be submitted.

    Attributes:
        copies: rows of device address, host address and bytes.
        results: where the digests of its piece go; None where none are wanted.
    """

    round: Round
    copies: Words
    results: Words | None


class _Tables(NamedTuple):
    """Device addresses of a round's tables, and their rows."""

    moves: int
    move_count: int
    runs: int
    run_count: int


class Submission(abc.ABC):
    """Copies of one direction while they are put together.

    Attributes:
        commands: those that were not submitted yet.
        keep: host memory that the device still reads or writes.
    """

    def __init__(self, device: Device, lane: Lane, fence: Event) -> None:
        self._device, self._lane = device, lane
        self.commands: list[Command] = [Wait(lane.copies, fence), Wait(lane.kernels, fence)]
        self.keep: list[HostBlock] = []

    @abc.abstractmethod
    def tables(self, part: Round) -> tuple[Words, Words]:
        """The round's moves and the runs of its checksums."""

    @property
    @abc.abstractmethod
    def upload_stream(self) -> Stream:
        """The stream that brings tables to the device; its later work, and what waits for it, may use them."""

    @abc.abstractmethod
    def round(self, part: Part, tables: _Tables) -> Iterator[Command]:
        """One round."""

    @abc.abstractmethod
    def end(self, event: Event) -> Iterator[Command]:
        """Record the event behind everything."""

    @abc.abstractmethod
    def bounce(self, part: Part, slot: Bytes, buffer: Bytes) -> None:
        """One round by a page-locked buffer of the round's size, which its copies go from or to; waits on the host."""

    def host_block(self, words: int) -> HostBlock:
        """Page-locked memory, kept until the copies are over."""
        self.keep.append(self._lane.host.take(words))
        return self.keep[-1]

    def add(self, parts: Iterable[Part]) -> None:
        """Rounds, one after the other, submitted by groups."""
        for group in _groups(parts, self._lane.group_bytes):
            table = self._lane.tables[0]
            self._lane.tables.reverse()  # the pair takes turns
            found = self._upload(group, table)
            for part, tables in zip(group, found, strict=True):
                self.commands += self.round(part, tables)
            self.commands.append(Record(self._lane.kernels, table.free))
            self._flush()

    def finish(self) -> Event:
        """Submit everything.

        Returns:
            An event behind it.
        """
        event = self._device.event()
        self.commands += self.end(event)
        self._flush()
        self._lane.hold(self.keep, event)
        return event

    def _flush(self) -> None:
        commands, self.commands = self.commands, []
        self._device.submit(commands)

    def _upload(self, parts: Sequence[Part], table: _TableMemory) -> list[_Tables]:
        found: list[_Tables] = []
        contents: list[Words] = []
        begin = address = table.memory.address
        for part in parts:
            moves, runs = self.tables(part.round)
            runs = runs if part.results is not None else runs[:0]
            found.append(_Tables(address, len(moves), address + moves.nbytes, len(runs)))
            contents += [moves.ravel(), runs.ravel()]
            address += moves.nbytes + runs.nbytes
        if address > begin:
            memory = self.host_block((address - begin) // 8).words
            np.concatenate(contents, out=memory)
            self.commands += [
                Wait(self.upload_stream, table.free),
                Copy(self.upload_stream, _row(memory.ctypes.data, begin, memory.nbytes)),
            ]
        return found

    def _move(self, tables: _Tables) -> Iterator[Command]:
        if tables.move_count:
            yield Move(self._lane.kernels, tables.moves, tables.move_count)

    def _digest(self, part: Part, tables: _Tables) -> Iterator[Command]:
        """The digests of the round's tiles, into their place in the piece's results."""
        if part.results is not None:
            begin, end = part.round.begin, part.round.end
            own = part.results[begin // TILE_BYTES :].ctypes.data
            yield Digest(self._lane.kernels, tables.runs, tables.run_count, end - begin, own)


class Store(Submission):
    """Pages into slots."""

    @property
    def upload_stream(self) -> Stream:
        return self._lane.kernels

    def tables(self, part: Round) -> tuple[Words, Words]:
        return part.moves, part.staged

    def round(self, part: Part, tables: _Tables) -> Iterator[Command]:
        lane, buffer = self._lane, part.round.buffer
        if buffer is not None:
            yield Wait(lane.kernels, lane.buffer_free[buffer])
            yield from self._move(tables)
            yield Record(lane.kernels, lane.handed_over)
            yield Wait(lane.copies, lane.handed_over)
        yield Copy(lane.copies, part.copies)
        if buffer is not None:
            yield Record(lane.copies, lane.buffer_free[buffer])
        yield from self._digest(part, tables)

    def bounce(self, part: Part, slot: Bytes, buffer: Bytes) -> None:
        self.add([part])
        self._lane.synchronize()
        slot[part.round.begin : part.round.end] = buffer

    def end(self, event: Event) -> Iterator[Command]:
        yield Record(self._lane.kernels, self._lane.handed_over)
        yield Wait(self._lane.copies, self._lane.handed_over)
        yield Record(self._lane.copies, event)


class Load(Submission):
    """Slots into pages. The digests are those of what arrived in the pages."""

    @property
    def upload_stream(self) -> Stream:
        return self._lane.copies

    def tables(self, part: Round) -> tuple[Words, Words]:
        return part.moves[:, [1, 0, 2]], part.pages

    def round(self, part: Part, tables: _Tables) -> Iterator[Command]:
        lane, buffer = self._lane, part.round.buffer
        if buffer is not None:
            yield Wait(lane.copies, lane.buffer_free[buffer])
        yield Copy(lane.copies, np.ascontiguousarray(part.copies[:, [1, 0, 2]]))
        yield Record(lane.copies, lane.handed_over)
        yield Wait(lane.kernels, lane.handed_over)
        yield from self._move(tables)
        yield from self._digest(part, tables)
        if buffer is not None:
            yield Record(lane.kernels, lane.buffer_free[buffer])

    def bounce(self, part: Part, slot: Bytes, buffer: Bytes) -> None:
        buffer[:] = slot[part.round.begin : part.round.end]
        self.add([part])
        self._lane.synchronize()

    def end(self, event: Event) -> Iterator[Command]:
        yield Record(self._lane.kernels, event)


def _groups(parts: Iterable[Part], payload_bytes: int) -> Iterator[list[Part]]:
    """Rounds whose tables fit into device memory at once, and not much more payload than this."""
    group: list[Part] = []
    table_bytes = copied = 0
    for part in parts:
        needed = part.round.moves.nbytes + part.round.pages.nbytes
        if group and table_bytes + needed > _TABLE_BYTES:
            yield group
            group, table_bytes, copied = [], 0, 0
        group.append(part)
        table_bytes += needed
        copied += part.round.end - part.round.begin
        if copied >= payload_bytes:  # before the next part is asked for, which takes a while
            yield group
            group, table_bytes, copied = [], 0, 0
    if group:
        yield group


def _row(source: int, target: int, size: int) -> Words:
    return np.array([[source, target, size]], dtype=np.uint64)
