"""The small world of `world.py` with real bytes: pages on a device, a real worker half, a pool file, and an engine that
reuses a freed block at once. For races between the engine's writes and the copies.

Every page of a prefix has its own byte. A forward writes it on the compute stream, as slowly as a test wants; what is
loaded later must be that byte and nothing else.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from lmcache_mp_safe.contract import SHARED_MEMORY, JobOutcome, PoolSegment, StepPlan
from lmcache_mp_safe.geometry.groups import GroupKind
from lmcache_mp_safe.geometry.payload import ObjectLayout
from lmcache_mp_safe.ids import RequestId, ServerEpoch
from lmcache_mp_safe.ops.device import Device, Stream
from lmcache_mp_safe.ops.streamed import StreamedBackend, StreamFence
from lmcache_mp_safe.scheduler.certify import Pins
from lmcache_mp_safe.testing import world as world_module
from lmcache_mp_safe.testing.fake_wire import FakePool, FakeWire
from lmcache_mp_safe.testing.pools import pool_file, simple_pages
from lmcache_mp_safe.testing.world import BLOCK, FULL, STATE, FakeRequest, World, prompt
from lmcache_mp_safe.worker.half import WorkerHalf

PAGE_BYTES = 64 << 10
GROUPS = (FULL, STATE)
OBJECTS = 64


class Rig(Protocol):
    """A device and what a test does to it."""

    device: Device
    pages: torch.Tensor  # flat uint8, in the memory of the device

    def write(self, start: int, end: int, value: int) -> None:
        """Queue a write of pages[start:end] on the compute stream."""

    def delay(self, stream: Stream) -> None:
        """Keep a stream from going on for a time in which an engine makes many steps."""

    def finish(self) -> None:
        """Wait for everything that was queued."""


class FileWire(FakeWire):
    """A fake wire whose pool lies in shared memory."""

    def __init__(self, object_bytes: int, segment: PoolSegment) -> None:
        super().__init__(object_bytes, capacity=0)
        self.capacity = OBJECTS
        self._file_segment = segment
        with (SHARED_MEMORY / segment.name).open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), segment.size)
        self.pool = FakePool(self._map)  # type: ignore[arg-type]

    @property
    def segment(self) -> PoolSegment:
        return self._file_segment


class DeviceWorld(World):
    """One engine over a rig."""

    def __init__(self, rig: Rig, segment: PoolSegment, *, blocks: int) -> None:
        self.rig = rig
        self._segment = segment
        layout, _ = simple_pages([[PAGE_BYTES]] * len(GROUPS), blocks)
        super().__init__(GROUPS, blocks=blocks, layouts=[layout.rank_layout(0)], pin_fraction=0.5)
        self.pool.reuses_at_once = True
        self.backend = StreamedBackend(rig.device, [rig.pages])
        self.worker = WorkerHalf(rank=0, pages=layout, backend=self.backend)
        self.outcomes: list[JobOutcome] = []
        self.slow_forward = False

    def _make_wire(self, object_bytes: int, generation: str, first_epoch: ServerEpoch) -> FakeWire:
        wire = FileWire(object_bytes, self._segment)
        self.wires.append(wire)
        return wire

    def plan(self, scheduled: Sequence[FakeRequest] = (), *, preempted: bool = False) -> StepPlan:
        plan = self.half.build_plan([request.request_id for request in scheduled], preempted)
        self.worker.begin_step(plan)
        return plan

    def collect(self) -> set[RequestId]:
        """What the worker has to say reaches the scheduler."""
        self.worker.poll()
        report = self.worker.take_report()
        if report is None:
            return set()
        self.outcomes += [job.outcome for job in report.jobs]
        return self.half.reported(report)

    def compute(self, request: FakeRequest, tokens: int) -> None:
        """One step: hashes, plan and copies, then the forward that writes the pages, then the old states are freed."""
        first, last = (request.num_computed_tokens // BLOCK, (request.num_computed_tokens + tokens) // BLOCK)
        super().compute(request, tokens)
        if self.slow_forward:
            self.rig.delay(self.rig.device.compute_stream())
        for column in range(first, last):
            for group in range(len(GROUPS)):
                self._write(request.table[group, column].block_id, group, tag(request, group, column))
        self._free_old_states(request, last - 1)
        self.collect()

    def _free_old_states(self, request: FakeRequest, last: int) -> None:
        """vLLM frees the state blocks of a running request about two steps after they were left."""
        for (group, column), block in list(request.table.items()):
            if GROUPS[group].kind is GroupKind.RECURRENT and column < last - 1 and block in request.blocks:
                request.blocks.remove(block)
                self.pool.unpin([block])

    def _write(self, block: int, group: int, value: int) -> None:
        start = group * PAGE_BYTES * self.pool.total_blocks + block * PAGE_BYTES
        self.rig.write(start, start + PAGE_BYTES, value)

    def serve(self, request: FakeRequest) -> None:
        """Compute a whole prompt, one block a step."""
        assert self.matched(request) == 0
        self.admit(request, 0)
        while request.num_computed_tokens < request.num_prompt_tokens:
            self.compute(request, BLOCK)
        self.finish(request)

    def drain(self) -> None:
        """Everything that is under way ends."""
        for _ in range(100):
            self.rig.finish()
            self.collect()
            if not self.half.has_pending_work:
                return
            self.plan()
        raise AssertionError("the connector still has pending work")

    def load(self, request: FakeRequest) -> tuple[int, list[str]]:
        """Load the longest hit of a prompt, as an engine would that has none of it in its own cache.

        Returns:
            Tokens of the hit, and the pages that are not what the prompt's forward wrote.
        """
        asked = FakeRequest(request.name + " again", request.token_ids)
        tokens = self.matched(asked)
        self.admit(asked, tokens)
        loaded = list(asked.blocks)
        self.plan()
        self.drain()
        last = tokens // BLOCK - 1
        places = [(0, column) for column in range(last + 1)] + [(1, last)] * (tokens > 0)
        wrong = [
            f"group {group}, column {column}: {found} instead of {tag(request, group, column)}"
            for block, (group, column) in zip(loaded, places, strict=True)
            if (found := self._bytes(block.block_id, group)) != {tag(request, group, column)}
        ]
        self.finish(asked)
        return tokens, wrong

    def _bytes(self, block: int, group: int) -> set[int]:
        start = group * PAGE_BYTES * self.pool.total_blocks + block * PAGE_BYTES
        return set(self.rig.pages[start : start + PAGE_BYTES].unique().tolist())


def tag(request: FakeRequest, group: int, column: int) -> int:
    """What the forward writes into this page; never 0, and others for a neighbouring column, group or prompt."""
    return 1 + (request.token_ids[0] * 31 + column * 2 + group) % 251


def pages_bytes(blocks: int) -> int:
    return len(GROUPS) * PAGE_BYTES * blocks


@contextlib.contextmanager
def device_world(rig: Rig, blocks: int) -> Iterator[DeviceWorld]:
    layout = ObjectLayout.for_payload([PAGE_BYTES])
    with pool_file(OBJECTS * layout.object_bytes, layout) as segment:
        world = DeviceWorld(rig, segment, blocks=blocks)
        yield world
        rig.finish()
        world.worker.shutdown()


# --- the races --------------------------------------------------------------------------------------------------------


def slow_writes_before_the_fence(rig: Rig, blocks: int) -> list[str]:
    """A slow kernel stands between the forward's writes and what was queued before them; stores must wait for both.

    Returns:
        Wrong pages, after everything was stored and loaded again.
    """
    with device_world(rig, blocks) as world:
        world.slow_forward = True
        request = FakeRequest("slow", prompt(6 * BLOCK + 1, seed=1))
        world.serve(request)
        world.drain()
        tokens, wrong = world.load(request)
        assert tokens, "no hit: nothing was shown"
        return wrong


def copies_slower_than_the_engine(rig: Rig, blocks: int) -> list[str]:
    """The store stream is late by many steps, while the engine frees blocks and reuses what is free at once.

    Returns:
        Wrong pages, after everything was stored and loaded again.
    """
    with device_world(rig, blocks) as world:
        requests = [FakeRequest(f"r{n}", prompt(5 * BLOCK + 1, seed=n)) for n in range(1, 4)]
        for request in requests:
            for stream in world.backend.store_streams:
                rig.delay(stream)
            world.serve(request)
        world.drain()
        found = [world.load(request) for request in requests]
        assert any(tokens for tokens, _ in found), "no hit: nothing was shown"
        return [page for _, wrong in found for page in wrong]


# --- the same races without one of the guards, so that a test can show that it sees them ------------------------------

Setter = Callable[[object, str, object], None]  # `setattr`, or pytest's, which takes it back


def no_wait_for_the_fence(set_attribute: Setter) -> None:
    """The fence is recorded on a stream that has nothing to do."""
    set_attribute(StreamedBackend, "record_fence", lambda self: StreamFence(self._device.side_stream().record()))


def no_pins(set_attribute: Setter) -> None:
    """Source blocks are certified and not held."""
    set_attribute(world_module.FakePool, "pin", lambda self, blocks: None)
    set_attribute(Pins, "unpin", lambda self, certificate: setattr(self, "held", self.held - len(certificate.blocks)))


def no_pins_and_no_watch(set_attribute: Setter) -> None:
    """And the forward does not wait for a copy whose source block lost its hash."""
    no_pins(set_attribute)
    set_attribute(WorkerHalf, "_hold_compute", lambda self, running: None)
