"""Pages on a GPU, objects in /dev/shm, and a backend between them: all that the GPU cases know of the package's copies.

Geometries, one rank:

    H   a hybrid model's chunk of 184 MB: 16 attention layers x 4 blocks and 48 recurrent layers x 1 state, in 112 runs
    A   a chunk of 16 blocks of 16 tokens of an 8B-class attention model, 32 MiB: 32 layers x 16 blocks, in 512 runs

Blocks are drawn at random and are never neighbours, so no two runs merge.
"""

from __future__ import annotations

import contextlib
import gc
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lmcache_mp_safe.bench.runner import WrongBytesError
from lmcache_mp_safe.contract import SHARED_MEMORY, ObjectCopy, PoolSegment
from lmcache_mp_safe.geometry.checksum import PayloadChecksum
from lmcache_mp_safe.geometry.payload import ObjectLayout
from lmcache_mp_safe.geometry.spans import Spans, spans
from lmcache_mp_safe.ops.contract import Bytes, Completion, Fence
from lmcache_mp_safe.ops.device import Device, DeviceError
from lmcache_mp_safe.ops.streamed import StreamedBackend
from lmcache_mp_safe.ops.submission import Store
from lmcache_mp_safe.testing.pools import pool_file, simple_pages
from lmcache_mp_safe.worker.copy_thread import CopyThread
from lmcache_mp_safe.worker.half import JOBS_AT_ONCE, WorkerHalf
from lmcache_mp_safe.worker.pool import MappedPool

DIRECT_ALWAYS, DIRECT_NEVER = 1, 1 << 40
DEVICES = ("csrc", "cupy", "csrc loop")
PIECE = 400 * 2 * 4 * 256 * 2  # bytes: 400 tokens of keys and values, 4 heads of 256 dims in bf16


def no_gpu(shared_memory_bytes: int = 0) -> str | None:
    """Why a GPU case cannot run here."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < shared_memory_bytes:
        return f"{SHARED_MEMORY} has {free / 1e9:.1f} GB free, {shared_memory_bytes / 1e9:.1f} GB are needed"
    return None


def device_of(kind: str) -> Device:
    """One of `DEVICES`.

    Raises:
        DeviceError: it cannot be used here; says why.
    """
    from lmcache_mp_safe.ops.cupy_device import CupyDevice
    from lmcache_mp_safe.ops.native import NativeDevice

    if kind == "cupy":
        return CupyDevice("cuda:0", why="benchmark")
    return NativeDevice("cuda:0", why="benchmark", force_loop=kind == "csrc loop")


def best_device() -> tuple[str, Device]:
    """csrc, or cupy where that was not built."""
    try:
        return "csrc", device_of("csrc")
    except DeviceError:
        return "cupy", device_of("cupy")


@dataclass(frozen=True)
class Geometry:
    """Layers of one object.

    Attributes:
        groups: bytes of a block's page, by group and layer.
        blocks: blocks of each group in an object.
    """

    name: str
    groups: tuple[tuple[int, ...], ...]
    blocks: tuple[int, ...]

    @property
    def payload_bytes(self) -> int:
        return sum(sum(pages) * count for pages, count in zip(self.groups, self.blocks, strict=True))

    @property
    def runs(self) -> int:
        return sum(len(pages) * count for pages, count in zip(self.groups, self.blocks, strict=True))


def hybrid(piece: int = PIECE) -> Geometry:
    return Geometry("H", ((piece,) * 16, (piece,) * 48), (4, 1))


def attention() -> Geometry:
    return Geometry("A", ((64 << 10,) * 32,), (16,))


def equal_runs(run_bytes: int, payload_bytes: int = 64 << 20) -> Geometry:
    layers = 16
    return Geometry(f"{run_bytes >> 10} KiB runs", ((run_bytes,) * layers,), (payload_bytes // layers // run_bytes,))


class Pages:
    """The KV cache: blocks of `objects` objects to store from, and of as many to load into."""

    def __init__(self, geometry: Geometry, objects: int, device: str = "cuda") -> None:
        self.geometry = geometry
        needed = 2 * objects * sum(geometry.blocks)
        self.layout, size = simple_pages(geometry.groups, 2 * needed + 2)
        self.buffer = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
        if device != "cpu":
            torch.cuda.synchronize()
        ids = iter((2 + 2 * np.random.default_rng(0).permutation(needed)).tolist())
        drawn = [tuple(tuple(next(ids) for _ in range(n)) for n in geometry.blocks) for _ in range(2 * objects)]
        self.sources, self.targets = drawn[:objects], drawn[objects:]
        self.object_layout = ObjectLayout.for_payload([geometry.payload_bytes])

    @property
    def pool_bytes(self) -> int:
        return len(self.sources) * self.object_layout.object_bytes

    def spans(self, blocks: Sequence[Sequence[int]]) -> Spans:
        return spans(blocks, self.layout, self.object_layout.slices[0].capacity)

    def payload(self, blocks: Sequence[Sequence[int]]) -> torch.Tensor:
        """The payload of these blocks, gathered by torch: independent of `spans` and of any backend."""
        return torch.cat(
            [
                self.buffer[segment.offset + block * segment.stride :][: segment.length]
                for layers, ids in zip(self.layout.groups, blocks, strict=True)
                for layer in layers
                for segment in layer.segments
                for block in ids
            ]
        )


class Copies:
    """A backend, and a slot for each object."""

    def __init__(self, pages: Pages, backend: StreamedBackend, slots: list[Bytes]) -> None:
        self.pages, self.backend, self.slots = pages, backend, slots
        self._sources = [pages.spans(blocks) for blocks in pages.sources]
        self._targets = [pages.spans(blocks) for blocks in pages.targets]
        self._turn = 0

    def submit(self, way: str, *, checked: bool, fence: Fence | None = None) -> Completion:
        """Queue the copy of the next object; `way` is store or load."""
        return self._submit(way, 1, checked=checked, fence=fence if fence is not None else self.backend.record_fence())

    def _submit(self, way: str, count: int, *, checked: bool, fence: Fence) -> Completion:
        indices = [(self._turn + n) % len(self.slots) for n in range(count)]
        self._turn += count
        slots = [self.slots[index] for index in indices]
        payload = Spans.joined([((self._targets if way == "load" else self._sources)[index], 1) for index in indices])
        if way == "load":
            return self.backend.copy_in(payload, slots, fence, checked=checked)
        if checked:
            return self.backend.copy_out(payload, slots, fence)
        # Stores are always sealed with a checksum; this is what they would cost without.
        return self.backend._copy(Store, self.backend._out, payload, slots, fence, checked=False)

    def copy(self, way: str, count: int, *, checked: bool) -> None:
        """Copy that many objects, as many at once as a plan's are, and wait until they are over."""
        fence = self.backend.record_fence()
        begun = [
            self._submit(way, min(JOBS_AT_ONCE, count - first), checked=checked, fence=fence)
            for first in range(0, count, JOBS_AT_ONCE)
        ]
        self.backend.drain()
        for completion in begun:
            assert completion.done()
            _ = completion.checksums

    def verify(self) -> None:
        """Store and load every object, and compare.

        Raises:
            WrongBytesError: a slot or a page holds something else than it should, or a checksum is wrong.
        """
        size = self.pages.geometry.payload_bytes
        for slot in self.slots:
            slot[:] = 7
        for blocks in self.pages.targets:
            for layers, ids in zip(self.pages.layout.groups, blocks, strict=True):
                for segment in (segment for layer in layers for segment in layer.segments):
                    for block in ids:
                        self.pages.buffer[segment.offset + block * segment.stride :][: segment.length].fill_(9)
        self._turn = 0
        for way in ("store", "load"):
            fence = self.backend.record_fence()
            begun = [self.submit(way, checked=True, fence=fence) for _ in self.slots]
            self.backend.drain()
            for index, (slot, completion) in enumerate(zip(self.slots, begun, strict=True)):
                wanted = self.pages.payload(self.pages.sources[index])
                arrived = (
                    torch.from_numpy(slot[:size].copy()).to(wanted.device)  # torch cannot copy across registrations
                    if way == "store"
                    else self.pages.payload(self.pages.targets[index])
                )
                if not torch.equal(arrived, wanted):
                    raise WrongBytesError(f"{way} of object {index}: {int((arrived != wanted).sum())} wrong bytes")
                if index == 0 and completion.checksums[0] != checksum(slot[:size]):
                    raise WrongBytesError(f"{way} of object {index}: wrong checksum")


def checksum(payload: Bytes) -> int:
    state = PayloadChecksum()
    state.update(payload)
    return state.intdigest()


@contextlib.contextmanager
def copies(pages: Pages, device: Device, direct_bytes: int | None = None) -> Iterator[Copies]:
    """A backend over the pages and a pool file whose slots are page-locked."""
    backend = StreamedBackend(device, [pages.buffer], direct_bytes=direct_bytes)
    size = pages.object_layout.object_bytes
    with pool_file(pages.pool_bytes, pages.object_layout) as segment:
        pool = MappedPool(segment, backend.adopt)
        try:
            slots = [pool.prepare(index * size, size) for index in range(len(pages.sources))]
            if not all(memory.is_pinned(slot.ctypes.data, len(slot)) for memory in backend._memories for slot in slots):
                raise DeviceError("the pool could not be page-locked: the figures would be those of bounce buffers")
            yield Copies(pages, backend, slots)
        finally:
            backend.drain()
            slots = []
            pool.close()
            gc.collect()


@contextlib.contextmanager
def worker_half(pages: Pages, device: Device, direct_bytes: int | None = None, **options: Any) -> Iterator[WorkerHalf]:
    """A worker half as `startup.py` makes it: copies are submitted by a thread of their own."""
    backend = StreamedBackend(device, [pages.buffer], direct_bytes=direct_bytes)
    half = WorkerHalf(rank=0, pages=pages.layout, backend=backend, queue=CopyThread(backend.enter_thread), **options)
    try:
        yield half
    finally:
        half.shutdown()
        gc.collect()


def object_copy(digest: bytes, blocks: Sequence[Sequence[int]], slot: int) -> ObjectCopy:
    return ObjectCopy(digest, tuple(tuple(ids) for ids in blocks), (slot,))


def open_warm(size: int) -> Any:
    """For `WorkerHalf(open_pool=...)`: maps the pool and page-locks its first bytes, as long use would have."""

    def opened(segment: PoolSegment, backend: Any) -> MappedPool:
        pool = MappedPool(segment, backend.adopt)
        pool.prepare(0, min(size, segment.size))
        return pool

    return opened
