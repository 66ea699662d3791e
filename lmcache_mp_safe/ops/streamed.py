"""Copies on a device with streams, gated by a fence on the compute stream.

`rounds.py` says which bytes go which way, `submission.py` makes commands of it; here they meet the pool's memory.

Copies of one direction end in the order of their submission. Device memory that two streams use, staging buffers and
tables, changes hands by events. Nothing waits on the host, but for slots that could not be page-locked.

Memory: pages and slots belong to the caller until the completion is done. Tables and digests in page-locked host memory
belong to the lane until the event behind them has passed, whatever becomes of the completion. Staging buffers, device
tables and streams live as long as the backend.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lmcache_mp_safe.contract import SKIP
from lmcache_mp_safe.errors import LocalError
from lmcache_mp_safe.geometry.checksum import TILE_BYTES, combine, tile_count
from lmcache_mp_safe.geometry.spans import Spans
from lmcache_mp_safe.ops.contract import Bytes, Completion, Fence, SlotMemory
from lmcache_mp_safe.ops.device import Device, Event, Stream, Words
from lmcache_mp_safe.ops.host_blocks import HostBlock
from lmcache_mp_safe.ops.pinning import PinnedMemory
from lmcache_mp_safe.ops.rounds import Integers, Runs, portions, rounds
from lmcache_mp_safe.ops.submission import Lane, Load, Part, Store, Submission

DEFAULT_STAGING_BYTES = 48 << 20
# The shortest runs that are faster straight than by the staging buffer (docs/gpu.md). Towards the device one call with
# many short copies keeps its caller waiting.
STORE_DIRECT_BYTES = 128 << 10
LOAD_DIRECT_BYTES = 1 << 20
BOUNCE_BYTES = 16 << 20

_STAGING_BUFFERS = 4  # two a direction


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
        memory: what they lie in.
    """

    def __init__(self, event: Event, digests: Sequence[Words | None], memory: HostBlock | None) -> None:
        self.event = event
        self._digests = digests
        self._memory = memory

    def done(self) -> bool:
        return self.event.done()

    @functools.cached_property
    def checksums(self) -> tuple[int, ...]:
        if not self.done():
            raise LocalError("a checksum was asked for before its copy was over")
        return tuple(0 if digests is None else combine(digests) for digests in self._digests)


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
        self._out = Lane(device, buffer_bytes, STORE_DIRECT_BYTES if direct_bytes is None else direct_bytes)
        self._in = Lane(device, buffer_bytes, LOAD_DIRECT_BYTES if direct_bytes is None else direct_bytes)
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
        return self._copy(Store, self._out, spans, slots, after, checked=True)

    def copy_in(self, spans: Spans, slots: Sequence[Bytes], after: Fence, *, checked: bool) -> Completion:
        return self._copy(Load, self._in, spans, slots, after, checked=checked)

    def _copy(
        self,
        kind: type[Submission],
        lane: Lane,
        spans: Spans,
        slots: Sequence[Bytes | None],
        after: Fence,
        *,
        checked: bool,
    ) -> Completion:
        assert isinstance(after, StreamFence)
        runs = self._runs(spans, slots)
        submission = kind(self._device, lane, after.event)
        sizes = np.bincount(runs.piece, weights=runs.length, minlength=len(slots)).astype(np.int64).tolist()
        tiles = [tile_count(size) if checked else 0 for size in sizes]
        memory = submission.host_block(sum(tiles)) if checked else None
        digests = _cut(memory, tiles)
        address = np.array([0 if slot is None else slot.ctypes.data for slot in slots])
        try:
            for pinned, part in self._by_memory(slots, address, runs):
                if pinned is not None:
                    submission.add(_straight(part, address, lane, pinned, digests))
                else:
                    self._bounced(submission, lane, part, slots, digests)
            return StreamCompletion(submission.finish(), digests, memory)
        except BaseException:
            lane.synchronize()  # what was submitted must not outlive its owners
            raise

    def _by_memory(
        self, slots: Sequence[Bytes | None], address: Integers, runs: Runs
    ) -> Iterator[tuple[PinnedMemory | None, Runs]]:
        """The runs of neighbouring pieces in the same memory; None for those that are not page-locked."""
        pieces = [(n, self._memory_of(int(address[n]), len(slot))) for n, slot in enumerate(slots) if slot is not None]
        for memory, group in itertools.groupby(pieces, lambda piece: piece[1]):
            numbers = [n for n, _ in group]
            first, end = np.searchsorted(runs.piece, [numbers[0], numbers[-1] + 1])
            yield memory, runs[first:end]

    def _memory_of(self, address: int, size: int) -> PinnedMemory | None:
        """The memory that a slot lies in, if all of the slot is page-locked."""
        memory = next((memory for memory in self._memories if memory.owns(address)), None)
        return memory if memory is not None and memory.is_pinned(address, size) else None

    def _bounced(
        self,
        submission: Submission,
        lane: Lane,
        runs: Runs,
        slots: Sequence[Bytes | None],
        digests: Sequence[Words | None],
    ) -> None:
        """By the page-locked buffer, which each round uses from its beginning."""
        if self._bounce is None:
            self._bounce = self._device.pinned_memory(BOUNCE_BYTES)
        limits = replace(lane.limits, payload_bytes=BOUNCE_BYTES)
        for one in rounds(runs, np.zeros(len(slots), np.int64), lane.addresses, limits):
            one.copies[:, 1] += np.uint64(self._bounce.ctypes.data - one.begin)
            slot = slots[one.piece]
            assert slot is not None
            submission.bounce(Part(one, one.copies, digests[one.piece]), slot, self._bounce[: one.end - one.begin])

    def _runs(self, spans: Spans, slots: Sequence[Bytes | None]) -> Runs:
        """The runs of the pieces that have a slot, with their device addresses.

        Raises:
            LocalError: one lies outside of its buffer or of its slot.
        """
        wanted = spans.page_offset != SKIP
        inside = ~wanted | ((spans.page_offset >= 0) & (spans.page_offset + spans.length <= self._size[spans.buffer]))
        room = np.array([np.iinfo(np.int64).max if slot is None else len(slot) for slot in slots])
        if not inside.all() or (spans.piece_offset + spans.length > room[spans.piece]).any():
            raise LocalError("a span lies outside of its buffer or of its slot")
        runs = Runs(spans.piece, np.where(wanted, self._address[spans.buffer] + spans.page_offset, 0), spans.length)
        there = np.array([slot is not None for slot in slots])
        if there.all():
            return runs
        there = there[spans.piece]
        return Runs(runs.piece[there], runs.address[there], runs.length[there])


def _straight(
    runs: Runs, slots: Integers, lane: Lane, memory: PinnedMemory, digests: Sequence[Words | None]
) -> Iterator[Part]:
    """The rounds of slots that the copy engine reaches; the staging buffers take turns over all of them."""
    turn = 0
    for portion in portions(runs, lane.group_bytes):
        for one in rounds(portion, slots, lane.addresses, lane.limits, turn):
            yield Part(one, memory.cut(one.copies, column=1), digests[one.piece])
            turn = turn if one.buffer is None else 1 - one.buffer


def _cut(memory: HostBlock | None, tiles: Sequence[int]) -> list[Words | None]:
    """The place of each piece's digests; None for one that has no tiles, or where none are wanted."""
    if memory is None:
        return [None] * len(tiles)
    parts = np.split(memory.words, np.cumsum(tiles)[:-1])
    return [part if count else None for part, count in zip(parts, tiles, strict=True)]
