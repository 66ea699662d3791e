"""Copies on a device with streams, gated by a fence on the compute stream.

Each direction has a stream for the copy engine and one for kernels, so that the checksums of one object and the
gathering of the next run while bytes are on the bus:

    store   kernels  | wait fence | tables | gather -> buffer | checksums of the pages ......|
            copies   | wait fence | wait gather | pages and buffer -> slot                   | event
    load    copies   | wait fence | tables | slot -> pages and buffer |
            kernels  | wait fence | wait copies | buffer -> pages | checksums of the pages | event

A load's kernels wait for its copies, so nothing of a later load that needs the copy engine may stand behind them: its
tables go with its copies, and digests are written to the host by the kernel itself.

Copies of one direction end in the order of their submission. Device memory that two streams use, staging buffers and
tables, changes hands by events. Nothing waits on the host, but for slots that could not be page-locked.

Memory: pages and slots belong to the caller until the completion is done. Tables and digests in page-locked host memory
belong to the lane until the event behind them has passed, whatever becomes of the completion. Staging buffers, device
tables and streams live as long as the backend.
"""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from lmcache_mp_safe.contract import SKIP
from lmcache_mp_safe.errors import LocalError
from lmcache_mp_safe.geometry.checksum import TILE_BYTES, combine, tile_count
from lmcache_mp_safe.geometry.spans import Spans
from lmcache_mp_safe.ops.contract import Bytes, Completion, Fence, SlotMemory
from lmcache_mp_safe.ops.device import Device, DeviceMemory, Event, Stream, Words
from lmcache_mp_safe.ops.pinning import PinnedMemory
from lmcache_mp_safe.ops.rounds import Limits, Round, Runs, rounds

DEFAULT_STAGING_BYTES = 48 << 20
# The shortest runs that are faster straight than by the staging buffer (docs/gpu.md). Towards the device one call with
# many short copies keeps its caller waiting.
STORE_DIRECT_BYTES = 128 << 10
LOAD_DIRECT_BYTES = 1 << 20
BOUNCE_BYTES = 16 << 20

_STAGING_BUFFERS = 4  # two a direction
_TABLE_RUNS = 32 << 10  # more than a tile has bytes
_TABLE_BYTES = _TABLE_RUNS * 5 * 8
_ROUND_BYTES = 1 << 30
_WORD_BYTES = 8


class StreamFence:
    """A mark on the compute stream; it exists only once it was recorded."""

    def __init__(self, event: Event) -> None:
        self.event = event

    def passed(self) -> bool:
        return self.event.done()


class StreamCompletion:
    """The end of one copy.

    Args:
        digests: of the tiles of each piece; None for a piece without a checksum.
    """

    def __init__(self, event: Event, digests: Sequence[Words | None]) -> None:
        self.event = event
        self._digests = digests

    def done(self) -> bool:
        return self.event.done()

    @property
    def checksums(self) -> tuple[int, ...]:
        if not self.done():
            raise LocalError("a checksum was asked for before its copy was over")
        return tuple(0 if digests is None else combine(digests) for digests in self._digests)


class _Lane:
    """One direction: its streams, and the device memory that its copies use one after the other."""

    def __init__(self, device: Device, buffer_bytes: int, direct_bytes: int) -> None:
        self.limits = Limits(buffer_bytes, _TABLE_RUNS, _ROUND_BYTES, direct_bytes)
        self.copies: Stream = device.side_stream()
        self.kernels: Stream = device.side_stream()
        self.buffers: list[DeviceMemory] = [device.device_memory(buffer_bytes) for _ in range(2)]
        self.buffer_free: list[Event | None] = [None, None]
        self.tables: list[DeviceMemory] = [device.device_memory(_TABLE_BYTES) for _ in range(2)]
        self.tables_free: list[Event | None] = [None, None]
        self._in_flight: deque[tuple[Event, list[Bytes]]] = deque()

    def hold(self, memory: list[Bytes], until: Event) -> None:
        """Keep host memory that the device still reads or writes; let go of what it is done with."""
        while self._in_flight and self._in_flight[0][0].done():
            self._in_flight.popleft()
        self._in_flight.append((until, memory))

    @property
    def addresses(self) -> tuple[int, int]:
        return self.buffers[0].address, self.buffers[1].address

    def wait(self, event: Event) -> None:
        self.copies.wait(event)
        self.kernels.wait(event)

    def synchronize(self) -> None:
        self.copies.synchronize()
        self.kernels.synchronize()


class _Submission(abc.ABC):
    """One copy while it is submitted. `keep` is host memory that the device still reads or writes."""

    def __init__(self, device: Device, lane: _Lane, checked: bool) -> None:
        self._device, self._lane, self._checked = device, lane, checked
        self.keep: list[Bytes] = []

    @abc.abstractmethod
    def tables(self, part: Round) -> tuple[Words, Words]:
        """The round's moves and the runs of its checksums."""

    @property
    @abc.abstractmethod
    def upload_stream(self) -> Stream:
        """The stream that brings tables to the device; its later work, and what waits for it, may use them."""

    @abc.abstractmethod
    def submit(self, part: Round, copies: Words, tables: _Tables, results: Words | None) -> None:
        """One round.

        Args:
            copies: rows of device address, host address and bytes.
            results: where the digests of the piece go; None where none are wanted.
        """

    @abc.abstractmethod
    def bounce(self, part: Round, slot: Bytes, buffer: Bytes, results: Words | None) -> None:
        """One round by a page-locked buffer of the round's size; waits on the host."""

    @abc.abstractmethod
    def end(self) -> Event:
        """Behind everything that was submitted."""

    def results(self, runs: Runs) -> Words:
        """Host memory for the digests of a piece."""
        tiles = tile_count(int(runs.length.sum()))
        memory = self._device.pinned_memory(max(tiles, 1) * _WORD_BYTES)
        self.keep.append(memory)
        return memory.view(np.uint64)[:tiles]

    def submit_all(self, parts: Sequence[Round], copies: Sequence[Words], results: Words | None) -> None:
        """Rounds whose tables fit into device memory together, and the copies of each; see `submit`."""
        lane = self._lane
        lane.tables.reverse()  # the pair takes turns
        lane.tables_free.reverse()
        for part, rows, tables in zip(parts, copies, self._upload(parts), strict=True):
            self.submit(part, rows, tables, results)
        lane.tables_free[0] = lane.kernels.record()

    def _upload(self, parts: Sequence[Round]) -> list[_Tables]:
        lane = self._lane
        found: list[_Tables] = []
        contents: list[Words] = []
        begin = address = lane.tables[0].address
        for part in parts:
            moves, runs = self.tables(part)
            runs = runs if self._checked else runs[:0]
            found.append(_Tables(address, len(moves), address + moves.nbytes, len(runs)))
            contents += [moves.ravel(), runs.ravel()]
            address += moves.nbytes + runs.nbytes
        if address == begin:
            return found
        memory = self._device.pinned_memory(address - begin)
        np.concatenate(contents, out=memory.view(np.uint64))
        self.keep.append(memory)
        if (free := lane.tables_free[0]) is not None:
            self.upload_stream.wait(free)
        self._device.copy(_row(memory.ctypes.data, begin, memory.nbytes), self.upload_stream)
        return found

    def move(self, tables: _Tables) -> None:
        if tables.move_count:
            self._device.move(tables.moves, tables.move_count, self._lane.kernels)

    def digest(self, part: Round, tables: _Tables, results: Words | None) -> None:
        """The digests of the round's tiles, into their place in the piece's results."""
        if results is None:
            return
        own = results[part.begin // TILE_BYTES :]
        length, stream = part.end - part.begin, self._lane.kernels
        self._device.digest(tables.runs, tables.run_count, length, own.ctypes.data, stream)


class _Tables(NamedTuple):
    """Device addresses of a round's tables, and their rows."""

    moves: int
    move_count: int
    runs: int
    run_count: int


class _Store(_Submission):
    """Pages into slots."""

    @property
    def upload_stream(self) -> Stream:
        return self._lane.kernels

    def tables(self, part: Round) -> tuple[Words, Words]:
        return part.moves, part.staged

    def submit(self, part: Round, copies: Words, tables: _Tables, results: Words | None) -> None:
        lane = self._lane
        if part.buffer is not None:
            free = lane.buffer_free[part.buffer]
            if free is not None:
                lane.kernels.wait(free)
            self.move(tables)
            lane.copies.wait(lane.kernels.record())
        self._device.copy(copies, lane.copies)
        if part.buffer is not None:
            lane.buffer_free[part.buffer] = lane.copies.record()
        self.digest(part, tables, results)

    def bounce(self, part: Round, slot: Bytes, buffer: Bytes, results: Words | None) -> None:
        self.submit_all([part], [_behind(part.copies, buffer.ctypes.data)], results)
        self._lane.synchronize()
        slot[part.begin : part.end] = buffer

    def end(self) -> Event:
        self._lane.copies.wait(self._lane.kernels.record())
        return self._lane.copies.record()


class _Load(_Submission):
    """Slots into pages. The digests are those of what arrived in the pages."""

    @property
    def upload_stream(self) -> Stream:
        return self._lane.copies

    def tables(self, part: Round) -> tuple[Words, Words]:
        return part.moves[:, [1, 0, 2]], part.pages

    def submit(self, part: Round, copies: Words, tables: _Tables, results: Words | None) -> None:
        lane = self._lane
        free = None if part.buffer is None else lane.buffer_free[part.buffer]
        if free is not None:
            lane.copies.wait(free)
        self._device.copy(copies[:, [1, 0, 2]], lane.copies)
        lane.kernels.wait(lane.copies.record())
        self.move(tables)
        self.digest(part, tables, results)
        if part.buffer is not None:
            lane.buffer_free[part.buffer] = lane.kernels.record()

    def bounce(self, part: Round, slot: Bytes, buffer: Bytes, results: Words | None) -> None:
        buffer[:] = slot[part.begin : part.end]
        self.submit_all([part], [_behind(part.copies, buffer.ctypes.data)], results)
        self._lane.synchronize()

    def end(self) -> Event:
        return self._lane.kernels.record()


def _row(source: int, target: int, size: int) -> Words:
    return np.array([[source, target, size]], dtype=np.uint64)


def _behind(copies: Words, address: int) -> Words:
    """A round's copies with host addresses in place of positions."""
    copies[:, 1] += np.uint64(address)
    return copies


class StreamedBackend:
    """Backend over flat buffers in device memory.

    Args:
        buffers: flat uint8 torch tensors.
        staging_bytes: device memory for gathering short runs, both directions together.
        direct_bytes: the shortest run that is copied straight between page and slot; None for what is fastest.
    """

    def __init__(
        self,
        device: Device,
        buffers: Sequence[Any],
        *,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
        direct_bytes: int | None = None,
    ) -> None:
        self.name, self.why = device.name, device.why
        self._device = device
        self.buffers = list(buffers)
        self._address = np.array([buffer.data_ptr() for buffer in buffers], dtype=np.int64)
        self._size = np.array([buffer.numel() for buffer in buffers], dtype=np.int64)
        buffer_bytes = max(staging_bytes // _STAGING_BUFFERS, TILE_BYTES)
        self._out = _Lane(device, buffer_bytes, STORE_DIRECT_BYTES if direct_bytes is None else direct_bytes)
        self._in = _Lane(device, buffer_bytes, LOAD_DIRECT_BYTES if direct_bytes is None else direct_bytes)
        self._memories: list[PinnedMemory] = []
        self._bounce: Bytes | None = None

    @property
    def store_streams(self) -> tuple[Stream, Stream]:
        """What copies out run on; for tests and measurements."""
        return self._out.copies, self._out.kernels

    def enter_thread(self) -> None:
        """To be called by a thread before it submits copies."""
        self._device.enter()

    def record_fence(self) -> Fence:
        return StreamFence(self._device.compute_stream().record())

    def adopt(self, memory: Bytes) -> SlotMemory:
        self._memories = [known for known in self._memories if not known.released]
        pinned = PinnedMemory(self._device, memory)
        self._memories.append(pinned)
        return pinned

    def hold_compute(self, until: Completion) -> None:
        assert isinstance(until, StreamCompletion)
        self._device.compute_stream().wait(until.event)

    def drain(self) -> None:
        self._out.synchronize()
        self._in.synchronize()

    # --- copies -----------------------------------------------------------------------------------------------------

    def copy_out(self, spans: Spans, slots: Sequence[Bytes | None], after: Fence) -> Completion:
        if (spans.page_offset == SKIP).any():
            raise LocalError("a store needs every page")
        return self._copy(_Store, self._out, spans, slots, after, checked=True)

    def copy_in(self, spans: Spans, slots: Sequence[Bytes], after: Fence, *, checked: bool) -> Completion:
        return self._copy(_Load, self._in, spans, slots, after, checked=checked)

    def _copy(
        self,
        kind: type[_Submission],
        lane: _Lane,
        spans: Spans,
        slots: Sequence[Bytes | None],
        after: Fence,
        *,
        checked: bool,
    ) -> Completion:
        assert isinstance(after, StreamFence)
        runs = [None if slot is None else self._runs(spans.of_piece(i), slot) for i, slot in enumerate(slots)]
        submission = kind(self._device, lane, checked)
        results = [None if part is None or not checked else submission.results(part) for part in runs]
        try:
            lane.wait(after.event)
            for part, slot, digests in zip(runs, slots, results, strict=True):
                if part is not None and slot is not None:
                    self._submit_piece(submission, lane, part, slot, digests)
            end = submission.end()
            lane.hold(submission.keep, end)
            return StreamCompletion(end, results)
        except BaseException:
            lane.synchronize()  # what was submitted must not outlive its owners
            raise

    def _submit_piece(
        self, submission: _Submission, lane: _Lane, runs: Runs, slot: Bytes, results: Words | None
    ) -> None:
        address = int(slot.ctypes.data)
        memory = next((memory for memory in self._memories if memory.owns(address)), None)
        if memory is None or not memory.is_pinned(address, len(slot)):
            self._bounce_piece(submission, lane, runs, slot, results)
            return
        for group in _that_fit(rounds(runs, lane.addresses, lane.limits)):
            copies = [memory.cut(_behind(part.copies, address + part.begin), column=1) for part in group]
            submission.submit_all(group, copies, results)

    def _bounce_piece(
        self, submission: _Submission, lane: _Lane, runs: Runs, slot: Bytes, results: Words | None
    ) -> None:
        if self._bounce is None:
            self._bounce = self._device.pinned_memory(BOUNCE_BYTES)
        for part in rounds(runs, lane.addresses, replace(lane.limits, payload_bytes=BOUNCE_BYTES)):
            submission.bounce(part, slot, self._bounce[: part.end - part.begin], results)

    def _runs(self, spans: Spans, slot: Bytes) -> Runs:
        """The device addresses of a piece's runs.

        Raises:
            LocalError: one lies outside of its buffer or of the slot.
        """
        wanted = spans.page_offset != SKIP
        end = spans.page_offset + spans.length
        inside = ~wanted | ((spans.page_offset >= 0) & (end <= self._size[spans.buffer]))
        if not inside.all() or (spans.piece_offset + spans.length > len(slot)).any():
            raise LocalError("a span lies outside of its buffer or of its slot")
        return Runs(np.where(wanted, self._address[spans.buffer] + spans.page_offset, 0), spans.length)


def _that_fit(parts: Iterable[Round]) -> Iterator[list[Round]]:
    """Rounds whose tables fit into device memory at once."""
    group: list[Round] = []
    size = 0
    for part in parts:
        needed = part.moves.nbytes + part.pages.nbytes
        if group and size + needed > _TABLE_BYTES:
            yield group
            group, size = [], 0
        group.append(part)
        size += needed
    if group:
        yield group
