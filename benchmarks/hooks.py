"""What the engine's thread pays: hooks of steps with many stores, while the copy thread works; and first use."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu_world import (
    DIRECT_ALWAYS,
    Geometry,
    Pages,
    attention,
    best_device,
    hybrid,
    no_gpu,
    object_copy,
    worker_half,
)
from lmcache_mp_safe.bench.measure import GB, MS, US, percentile
from lmcache_mp_safe.bench.runner import Check, Row, WrongBytesError
from lmcache_mp_safe.contract import JobOutcome, LoadJob, PoolSegment, StepPlan, StoreJob
from lmcache_mp_safe.ids import JobId, RequestId
from lmcache_mp_safe.ops.streamed import StreamedBackend
from lmcache_mp_safe.testing.pools import pool_file

JOBS = 64
PAUSE_S = 0.001
P99_S = 200e-6


class Engine:
    """Plans of stores, or of one load, and the hooks of a step around them."""

    def __init__(self, half: Any, pages: Pages, segment: PoolSegment) -> None:
        self._half, self._pages, self._segment = half, pages, segment
        self._digests = [secrets.token_bytes(32) for _ in pages.sources]
        self._numbers = itertools.count(1)
        self.open = 0

    def stores(self, count: int) -> tuple[StoreJob, ...]:
        size = self._pages.object_layout.object_bytes
        return tuple(
            StoreJob(JobId(next(self._numbers)), self._segment.epoch, object_copy(self._digests[i], blocks, i * size))
            for i, blocks in enumerate(self._pages.sources[:count])
        )

    def loads(self) -> tuple[LoadJob, ...]:
        """Every object, in one job."""
        size = self._pages.object_layout.object_bytes
        copies = tuple(object_copy(self._digests[i], ids, i * size) for i, ids in enumerate(self._pages.targets))
        return (LoadJob(JobId(next(self._numbers)), self._segment.epoch, RequestId("bench"), copies),)

    def step(self, stores: tuple[StoreJob, ...] = (), loads: tuple[LoadJob, ...] = ()) -> float:
        """Seconds of the three hooks.

        Raises:
            WrongBytesError: a job ended badly.
        """
        plan = StepPlan(next(self._numbers), self._segment, stores=stores, loads=loads)
        self.open += len(stores) + len(loads)
        begin = time.perf_counter()
        self._half.begin_step(plan)
        self._half.poll()
        report = self._half.take_report()
        seconds = time.perf_counter() - begin
        for job in report.jobs if report is not None else ():
            self.open -= 1
            if job.outcome is not JobOutcome.DONE:
                raise WrongBytesError(f"{job.outcome.value}: {job.detail}")
        return seconds

    def finish(self, pause_s: float = 0.0) -> None:
        while self.open:
            self.step()
            time.sleep(pause_s)


class Hooks:
    key = "hooks"
    description = (
        f"Time that begin_step, poll and take_report take in the engine's thread: steps whose plan has {JOBS} stores,"
        " and the steps after them in which the copy thread still works. H with pieces of 64 KiB that are copied"
        " straight, as its long ones are; a step every millisecond, a new plan when the last one's stores are reported."
    )

    def can_run(self) -> str | None:
        return no_gpu(4 << 30)

    def run(self, quick: bool) -> Iterator[Row]:
        _, device = best_device()
        plans = 20 if quick else 250
        geometries: tuple[tuple[Geometry, int | None], ...] = (
            (hybrid(64 << 10), DIRECT_ALWAYS),
            (attention(), None),
        )
        for geometry, direct_bytes in geometries:
            pages = Pages(geometry, JOBS)
            with (
                pool_file(pages.pool_bytes, pages.object_layout) as segment,
                worker_half(pages, device, direct_bytes) as half,
            ):
                yield from self._rows(Engine(half, pages, segment), pages, plans)
            torch.cuda.empty_cache()

    def _rows(self, engine: Engine, pages: Pages, plans: int) -> Iterator[Row]:
        for _ in range(2):  # the first touches and page-locks the pool
            engine.step(engine.stores(JOBS))
            engine.finish(PAUSE_S)
        planned: list[float] = []
        others: list[float] = []
        give_up = time.monotonic() + 25
        while len(planned) < plans and time.monotonic() < give_up:
            if engine.open:
                others.append(engine.step())
            else:
                planned.append(engine.step(engine.stores(JOBS)))
            time.sleep(PAUSE_S)
        engine.finish(PAUSE_S)
        engine.step((), engine.loads())
        engine.finish(PAUSE_S)
        for source, target in zip(pages.sources, pages.targets, strict=True):
            if not torch.equal(pages.payload(source), pages.payload(target)):
                raise WrongBytesError("a page that was stored and loaded")
        name = f"{pages.geometry.name}, {pages.geometry.runs} runs of {pages.geometry.groups[0][0] >> 10} KiB"
        for what, times in ((f"{JOBS} stores in the plan", planned), ("steps after", others)):
            values: dict[str, Any] = {
                "steps": len(times),
                "p50 us": percentile(times, 0.5) * US,
                "p99 us": percentile(times, 0.99) * US,
                "max us": max(times) * US,
            }
            yield Row(f"{name}: {what}", values, (Check("p99 us", percentile(times, 0.99) * US, "<=", P99_S * US),))


class FirstUse:
    key = "first-use"
    description = (
        "What the page-locking of a pool costs on the first store of a hybrid chunk of 184 MB, against a store into a"
        " slot that was used before; and the GPU memory that a backend holds."
    )

    def can_run(self) -> str | None:
        return no_gpu(4 << 30)

    def run(self, quick: bool) -> Iterator[Row]:
        kind, device = best_device()
        pages = Pages(hybrid(), 1 if quick else 8)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info()[0]
        begin = time.perf_counter()
        backend = StreamedBackend(device, [pages.buffer])
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        held = free - torch.cuda.mem_get_info()[0]
        yield Row(f"a backend ({kind})", {"seconds": seconds, "GPU MiB": held / 2**20})
        del backend
        torch.cuda.empty_cache()
        with pool_file(pages.pool_bytes, pages.object_layout) as segment, worker_half(pages, device) as half:
            engine = Engine(half, pages, segment)
            begin = time.perf_counter()
            engine.step()
            yield Row("mapping the pool, in the first step", {"seconds": time.perf_counter() - begin})
            cold, warm = self._store(engine, 1), self._store(engine, 1)
            yield Row("first store of a chunk", {"seconds": cold, "ms": cold * MS})
            yield Row("the same again", {"seconds": warm, "ms": warm * MS})
            count = len(pages.sources)
            if count > 1:
                cold, warm = self._store(engine, count), self._store(engine, count)
                gib = (count - 1) * pages.object_layout.object_bytes / 2**30
                values: dict[str, Any] = {
                    "seconds": cold,
                    "ms per GiB": (cold - warm) * MS / gib,
                    "GB/s": count * pages.geometry.payload_bytes / cold / GB,
                }
                yield Row(f"{count} chunks, {count - 1} in slots never used", values)
            engine.step((), engine.loads())
            engine.finish()
            for source, target in zip(pages.sources, pages.targets, strict=True):
                if not torch.equal(pages.payload(source), pages.payload(target)):
                    raise WrongBytesError("a page that was stored and loaded")
        yield from self._locking(device, 1)

    def _store(self, engine: Engine, count: int) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        engine.step(engine.stores(count))
        engine.finish(20e-6)
        return time.perf_counter() - begin

    def _locking(self, device: Any, gib: int) -> Iterator[Row]:
        """Claiming memory of /dev/shm, page-locking it and giving it back, by themselves."""
        pages = Pages(Geometry("one", ((64 << 10,),), (1,)), 1)
        backend = StreamedBackend(device, [pages.buffer])
        from lmcache_mp_safe.worker.pool import MappedPool

        with pool_file(gib << 30, pages.object_layout) as segment:
            pool = MappedPool(segment, backend.adopt)
            times = [time.perf_counter()]
            for part in (
                lambda: pool.claim(0, gib << 30),
                lambda: pool.prepare(0, gib << 30),
                lambda: pool.prepare(0, gib << 30),
                pool.close,
            ):
                part()
                times.append(time.perf_counter())
        names = ("claim memory", "page-lock it", "again", "release and unmap")
        for name, before, after in zip(names, times[:-1], times[1:], strict=True):
            yield Row(f"1 GiB of pool: {name}", {"seconds": after - before, "ms per GiB": (after - before) * MS / gib})
