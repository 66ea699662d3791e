"""Copies on a device with streams: one stream a direction, gated by a fence on the compute stream.

Order: a copy waits for its fence on the device; the fence was recorded behind every write of the earlier steps. Copies
of one direction end in the order of their submission, because they share a stream, and so the stream alone guards the
staging buffer and the tables of that direction. Nothing waits on the host, but for slots that could not be page-locked.

Memory: pages and slots belong to the caller until the completion is done. Tables and checksums in page-locked memory
belong to the completion. Staging buffers, device tables and streams live as long as the backend.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lmcache_mp_safe.contract import SKIP
from lmcache_mp_safe.errors import LocalError
from lmcache_mp_safe.geometry.checksum import TILE_BYTES, combine, tile_count
from lmcache_mp_safe.geometry.spans import Spans
from lmcache_mp_safe.ops.contract import Bytes, Completion, Fence, SlotMemory
from lmcache_mp_safe.ops.device import Device, DeviceMemory, Event, Stream, Words
from lmcache_mp_safe.ops.pinning import PinnedMemory
from lmcache_mp_safe.ops.rounds import Limits, Round, Runs, rounds

DEFAULT_STAGING_BYTES = 32 << 20
DEFAULT_DIRECT_BYTES = 512 << 10  # where the two ways are equally fast: docs/gpu.md
BOUNCE_BYTES = 16 << 20

_TABLE_RUNS = 64 << 10
_TILES = 64 << 10
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
        keep: what the device may still read until then.
    """

    def __init__(self, event: Event, digests: Sequence[Words | None], keep: Sequence[Any]) -> None:
        self.event = event
        self._digests = digests
        self._keep = keep

    def done(self) -> bool:
        return self.event.done()

    @property
    def checksums(self) -> tuple[int, ...]:
        if not self.done():
            raise LocalError("a checksum was asked for before its copy was over")
        return tuple(0 if digests is None else combine(digests) for digests in self._digests)


class _Lane:
    """One direction: a stream, and the device memory that its copies use one after the other."""

    def __init__(self, device: Device, staging_bytes: int) -> None:
        self.stream: Stream = device.side_stream()
        self.staging: DeviceMemory = device.device_memory(staging_bytes)
        self.moves: DeviceMemory = device.device_memory(_TABLE_RUNS * 3 * _WORD_BYTES)
        self.runs: DeviceMemory = device.device_memory(_TABLE_RUNS * 2 * _WORD_BYTES)
        self.digests: DeviceMemory = device.device_memory(_TILES * _WORD_BYTES)


class _Submission(abc.ABC):
    """One copy while it is submitted, round by round. `keep` is host memory that the device still reads or writes."""

    def __init__(self, device: Device, lane: _Lane) -> None:
        self._device, self._lane = device, lane
        self.keep: list[Bytes] = []

    def results(self, runs: Runs) -> Words:
        """Host memory for the digests of a piece."""
        tiles = tile_count(int(runs.length.sum()))
        memory = self._device.pinned_memory(max(tiles, 1) * _WORD_BYTES)
        self.keep.append(memory)
        return memory.view(np.uint64)[:tiles]

    @abc.abstractmethod
    def submit(self, part: Round, copies: Words, results: Words | None) -> None:
        """One round.

        Args:
            copies: rows of device address, host address and bytes.
            results: where the digests of the piece go; None where none are wanted.
        """

    @abc.abstractmethod
    def bounce(self, part: Round, slot: Bytes, buffer: Bytes, results: Words | None) -> None:
        """One round by a page-locked buffer of the round's size; waits on the host."""

    def copy(self, copies: Words) -> None:
        self._device.copy(copies, self._lane.stream)

    def digest(self, part: Round, runs: Words, results: Words) -> None:
        """The digests of the round's tiles, into their place in the piece's results."""
        stream, digests = self._lane.stream, self._lane.digests.address
        self._device.digest(
            self._upload(runs, self._lane.runs.address), len(runs), part.end - part.begin, digests, stream
        )
        own = results[part.begin // TILE_BYTES :][: tile_count(part.end - part.begin)]
        self.copy(np.array([[digests, own.ctypes.data, own.nbytes]], dtype=np.uint64))

    def move(self, moves: Words) -> None:
        if len(moves):
            self._device.move(self._upload(moves, self._lane.moves.address), len(moves), self._lane.stream)

    def _upload(self, table: Words, target: int) -> int:
        memory = self._device.pinned_memory(table.nbytes)
        memory[:] = np.ascontiguousarray(table).view(np.uint8).ravel()
        self.keep.append(memory)
        self.copy(np.array([[memory.ctypes.data, target, memory.nbytes]], dtype=np.uint64))
        return target


class _Store(_Submission):
    """Pages into slots."""

    def submit(self, part: Round, copies: Words, results: Words | None) -> None:
        self.move(part.moves)
        self.copy(copies)
        if results is not None:
            self.digest(part, part.staged, results)

    def bounce(self, part: Round, slot: Bytes, buffer: Bytes, results: Words | None) -> None:
        self.submit(part, _behind(part.copies, buffer.ctypes.data), results)
        self._lane.stream.synchronize()
        slot[part.begin : part.end] = buffer


class _Load(_Submission):
    """Slots into pages. The digests are those of what arrived in the pages."""

    def submit(self, part: Round, copies: Words, results: Words | None) -> None:
        self.copy(copies[:, [1, 0, 2]])
        self.move(part.moves[:, [1, 0, 2]])
        if results is not None:
            self.digest(part, part.pages, results)

    def bounce(self, part: Round, slot: Bytes, buffer: Bytes, results: Words | None) -> None:
        buffer[:] = slot[part.begin : part.end]
        self.submit(part, _behind(part.copies, buffer.ctypes.data), results)
        self._lane.stream.synchronize()


def _behind(copies: Words, address: int) -> Words:
    """A round's copies with host addresses in place of positions."""
    return copies + np.array([0, address, 0], dtype=np.uint64)


class StreamedBackend:
    """Backend over flat buffers in device memory.

    Args:
        buffers: flat uint8 torch tensors.
        staging_bytes: device memory for gathering short runs, both directions together.
        direct_bytes: the shortest run that the copy engine takes straight from or to its page.
    """

    def __init__(
        self,
        device: Device,
        buffers: Sequence[Any],
        *,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
        direct_bytes: int = DEFAULT_DIRECT_BYTES,
    ) -> None:
        self.name, self.why = device.name, device.why
        self._device = device
        self.buffers = list(buffers)
        self._address = np.array([buffer.data_ptr() for buffer in buffers], dtype=np.int64)
        self._size = np.array([buffer.numel() for buffer in buffers], dtype=np.int64)
        lane_bytes = max(staging_bytes // 2, TILE_BYTES)
        self._limits = Limits(lane_bytes, _TABLE_RUNS, _TILES * TILE_BYTES, direct_bytes)
        self._out, self._in = _Lane(device, lane_bytes), _Lane(device, lane_bytes)
        self._memories: list[PinnedMemory] = []
        self._bounce: Bytes | None = None

    @property
    def store_stream(self) -> Stream:
        """What copies out run on; for tests and measurements."""
        return self._out.stream

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
        self._out.stream.synchronize()
        self._in.stream.synchronize()

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
        submission = kind(self._device, lane)
        results = [None if part is None or not checked else submission.results(part) for part in runs]
        try:
            lane.stream.wait(after.event)
            for part, slot, digests in zip(runs, slots, results, strict=True):
                if part is not None and slot is not None:
                    self._submit_piece(submission, lane, part, slot, digests)
            return StreamCompletion(lane.stream.record(), results, submission.keep)
        except BaseException:
            lane.stream.synchronize()  # what was submitted must not outlive its owners
            raise

    def _submit_piece(
        self, submission: _Submission, lane: _Lane, runs: Runs, slot: Bytes, results: Words | None
    ) -> None:
        address = int(slot.ctypes.data)
        memory = next((memory for memory in self._memories if memory.owns(address)), None)
        if memory is not None and memory.is_pinned(address, len(slot)):
            for part in rounds(runs, lane.staging.address, self._limits):
                copies = memory.cut(_behind(part.copies, address + part.begin), column=1)
                submission.submit(part, copies, results)
            return
        if self._bounce is None:
            self._bounce = self._device.pinned_memory(BOUNCE_BYTES)
        for part in rounds(runs, lane.staging.address, replace(self._limits, payload_bytes=BOUNCE_BYTES)):
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
