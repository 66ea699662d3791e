"""This package's wire and worker half, driven by hand as an engine's scheduler and worker drive them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
import torch

from benchmarks.gpu_world import Pages, object_copy
from lmcache_mp_safe.bench.measure import Times
from lmcache_mp_safe.bench.runner import WrongBytesError
from lmcache_mp_safe.contract import JobOutcome, JobReport, LoadJob, PoolSegment, StepPlan, StoreJob
from lmcache_mp_safe.geometry.payload import ObjectLayout
from lmcache_mp_safe.ids import JobId, RequestId, ServerEpoch
from lmcache_mp_safe.wire import (
    CallId,
    Committed,
    Connected,
    LookupAnswered,
    Lost,
    Reserved,
    Retrieved,
    SessionId,
    Wire,
    WireConfig,
)
from lmcache_mp_safe.worker.half import WorkerHalf

CALL_BYTES = 2048 << 20  # most bytes in one reservation: the connector's default
_STEP_S = 20e-6
_GIVE_UP_S = 60.0
E = TypeVar("E")


class Loop:
    """Steps a wire and a worker half by hand, as an engine's scheduler and worker would between two forwards."""

    def __init__(self, url: str, object_layout: ObjectLayout, half: WorkerHalf) -> None:
        self.wire = Wire(WireConfig(url, f"bench-{secrets.token_hex(6)}", object_layout.object_bytes))
        self._half = half
        self._events: dict[CallId, Any] = {}
        self._reports: dict[JobId, JobReport] = {}
        self._connected = False
        self._plans = self._jobs = 0
        self.wire.start(time.monotonic())
        self.until(lambda: self._connected)
        assert self.wire.segment is not None
        slices = tuple((part.offset, part.size) for part in object_layout.slices)
        self._segment: PoolSegment = msgspec.structs.replace(self.wire.segment, slices=slices)
        self.plan()
        self.until(lambda: True)

    @property
    def now(self) -> float:
        return time.monotonic()

    def step(self) -> None:
        for event in self.wire.poll(self.now):
            if isinstance(event, Lost):
                raise RuntimeError(f"the server was lost: {event.why}")
            self._connected |= isinstance(event, Connected)
            if (call := getattr(event, "call", None)) is not None:
                self._events[call] = event
        self._half.poll()
        report = self._half.take_report()
        if report is not None:
            if report.unusable:
                raise RuntimeError(f"the pool cannot be used: {report.unusable}")
            self._reports |= {job.job_id: job for job in report.jobs}

    def until(self, condition: Callable[[], bool]) -> None:
        give_up = time.monotonic() + _GIVE_UP_S
        while True:
            self.step()
            if condition():
                return
            if time.monotonic() > give_up:
                raise RuntimeError(f"nothing happens; {self.wire.why_down}")
            time.sleep(_STEP_S)

    def plan(self, stores: Sequence[StoreJob] = (), loads: Sequence[LoadJob] = ()) -> None:
        self._plans += 1
        self._half.begin_step(StepPlan(self._plans, self._segment, stores=tuple(stores), loads=tuple(loads)))

    def next_job(self) -> JobId:
        self._jobs += 1
        return JobId(self._jobs)

    def take(self, call: CallId, kind: type[E]) -> E | None:
        """The answer to this call, if it has come."""
        event = self._events.pop(call, None)
        if event is not None and not isinstance(event, kind):
            raise RuntimeError(f"{event} instead of {kind.__name__}")
        return event

    def answer(self, call: CallId, kind: type[E]) -> E:
        found: list[E] = []

        def there() -> bool:
            if (event := self.take(call, kind)) is not None:
                found.append(event)
            return bool(found)

        self.until(there)
        return found[0]

    def ended(self, job: JobId) -> bool:
        report = self._reports.get(job)
        if report is not None and report.outcome is not JobOutcome.DONE:
            raise WrongBytesError(f"{report.outcome.value}: {report.detail}")
        return report is not None

    @property
    def epoch(self) -> ServerEpoch:
        return self._segment.epoch


@dataclass
class Reservation:
    """One reservation on its way from its slots to its commit, and the copies that go into it by object index."""

    session: SessionId
    call: CallId
    copies: Mapping[int, tuple[bytes, Sequence[Sequence[int]]]]  # digest and blocks
    jobs: list[JobId] = field(default_factory=list)
    commit: CallId | None = None
    accepted: bool = False


class Ours:
    """Stores and loads chunks as the connector does: a chunk object and a state object for each, both sealed."""

    def __init__(self, url: str, pages: Pages, half: WorkerHalf, object_layout: ObjectLayout) -> None:
        self._pages = pages
        self._loop = Loop(url, object_layout, half)
        self._chunks_a_call = max(1, CALL_BYTES // object_layout.object_bytes)
        self._digests: list[tuple[bytes, bytes]] = []

    def close(self) -> None:
        self._loop.wire.shutdown(2.0)

    def store(self, count: int) -> float:
        """Seconds until the server has acknowledged `count` new chunks and their states."""
        loop, wire = self._loop, self._loop.wire
        self._digests = [(secrets.token_bytes(32), secrets.token_bytes(32)) for _ in range(count)]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        chain = wire.open([chunk for chunk, _ in self._digests])
        open_: list[Reservation] = []
        for start in range(0, count, self._chunks_a_call):
            part = range(start, min(start + self._chunks_a_call, count))
            copies = {i: (self._digests[i][0], (self._pages.sources[i][0], ())) for i in part}
            open_.append(Reservation(chain, wire.reserve(chain, part.start, part.stop, loop.now), copies))
        sessions = [chain]
        for i, (_, state) in enumerate(self._digests):
            session = wire.open([state])
            sessions.append(session)
            copy = {0: (state, ((), self._pages.sources[i][1]))}
            open_.append(Reservation(session, wire.reserve(session, 0, 1, loop.now), copy))

        def advanced() -> bool:
            for run in open_:
                self._advance(run)
            return all(run.accepted for run in open_)

        loop.until(advanced)
        seconds = time.perf_counter() - begin
        for session in sessions:
            wire.close(session, loop.now)
        return seconds

    def _advance(self, run: Reservation) -> None:
        """Slots, then copies, then the commit."""
        loop = self._loop
        if run.commit is not None:
            if (committed := loop.take(run.commit, Committed)) is not None:
                run.accepted = committed.accepted
                if not run.accepted:
                    raise RuntimeError("the server refused a commit")
        elif run.jobs:
            ended = [loop.ended(job) for job in run.jobs]
            if all(ended):
                run.commit = loop.wire.commit(run.session, run.call, loop.now)
        elif (reserved := loop.take(run.call, Reserved)) is not None:
            if set(reserved.offsets) != set(run.copies):
                raise RuntimeError(f"slots for {sorted(reserved.offsets)} only of {sorted(run.copies)}")
            jobs = [
                StoreJob(loop.next_job(), loop.epoch, object_copy(digest, blocks, reserved.offsets[i]))
                for i, (digest, blocks) in run.copies.items()
            ]
            loop.plan(stores=jobs)
            run.jobs = [job.job_id for job in jobs]

    def load(self, count: int) -> tuple[float, float]:
        """Seconds of the lookup, and of the load into other blocks until all is there and checked."""
        loop, wire = self._loop, self._loop.wire
        chain, state, looked = self._found(count)
        begin = time.perf_counter()
        calls = wire.retrieve(chain, 0, count, loop.now), wire.retrieve(state, 0, 1, loop.now)
        chunks, states = (loop.answer(call, Retrieved).offsets for call in calls)
        copies = [
            object_copy(digest, (self._pages.targets[i][0], ()), slot)
            for i, ((digest, _), slot) in enumerate(zip(self._digests, chunks, strict=True))
        ]
        copies.append(object_copy(self._digests[-1][1], ((), self._pages.targets[count - 1][1]), states[0]))
        job = LoadJob(loop.next_job(), loop.epoch, RequestId("bench"), tuple(copies))
        loop.plan(loads=[job])
        loop.until(lambda: loop.ended(job.job_id))
        seconds = time.perf_counter() - begin
        for session in (chain, state):
            wire.done_reading(session, loop.now)
            wire.close(session, loop.now)
        return looked, seconds

    def _found(self, count: int) -> tuple[SessionId, SessionId, float]:
        """Sessions with locks on all chunks and on the last state, and the seconds of the lookup that found them."""
        loop, wire = self._loop, self._loop.wire
        give_up = time.monotonic() + 10
        while True:
            begin = time.perf_counter()
            sessions = wire.open([chunk for chunk, _ in self._digests]), wire.open([self._digests[-1][1]])
            calls = [wire.lookup(s, n, loop.now) for s, n in zip(sessions, (count, 1), strict=True)]
            found = [loop.answer(call, LookupAnswered).found for call in calls]
            seconds = time.perf_counter() - begin
            if found == [count, 1]:
                return (*sessions, seconds)
            for session in sessions:
                wire.close(session, loop.now)
            if time.monotonic() > give_up:
                raise RuntimeError(f"{found} objects are found of [{count}, 1] that were stored")
            time.sleep(0.002)

    def verify(self, count: int) -> None:
        """Compare what was loaded with what was stored, then spoil the targets.

        Raises:
            WrongBytesError: they differ.
        """
        pages = self._pages
        for i in range(count):
            state = i == count - 1
            wanted, arrived = (
                pages.payload((ids[0], ids[1] if state else ())) for ids in (pages.sources[i], pages.targets[i])
            )
            if not torch.equal(wanted, arrived):
                raise WrongBytesError(f"chunk {i} of {count}")
            for layers, ids in zip(pages.layout.groups, pages.targets[i], strict=True):
                for segment in (segment for layer in layers for segment in layer.segments):
                    for block in ids:
                        pages.buffer[segment.offset + block * segment.stride :][: segment.length].fill_(3)

    def measure(self, count: int, repeats: int) -> Times:
        times = Times()
        for repeat in range(repeats):
            stored = self.store(count)
            looked, loaded = self.load(count)
            self.verify(count)
            if repeat:
                times.store.append(stored)
                times.lookup.append(looked)
                times.load.append(loaded)
        return times
