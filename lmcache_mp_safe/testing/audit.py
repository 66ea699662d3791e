"""Watches one in-process engine: page bytes when they were certified, when they were copied, and when they were loaded.

A checksum cannot tell that a block was reused between its certification and its copy: it would vouch for the wrong
bytes. This does. A page is remembered at the first step after its block was certified and pinned (by then the step that
fills it has run), and must still be the same when its copy starts, in the slot when the copy is reported, and when it
has arrived in some other block. On a GPU every look waits for the compute stream, so an audited engine is slow.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lmcache_mp_safe.contract import SKIP, JobOutcome, JobReport, LoadJob, ObjectCopy, StepPlan, StoreJob
from lmcache_mp_safe.geometry.spans import spans
from lmcache_mp_safe.scheduler.certify import Certificate
from lmcache_mp_safe.worker.jobs import Running

_Blocks = tuple[tuple[int, ...], ...]
_Pages = tuple[bytes, ...]


@dataclass
class Audit:
    """What was seen.

    Attributes:
        stored: objects that were copied out. in_slots: those whose bytes were seen in the pool. loaded: objects that
            were copied in and known from a store.
        wrong: descriptions of pages that were not what they should be.
        ownerless: blocks that had no other owner when they were pinned: without the pin vLLM could have reused them.
    """

    stored: int = 0
    in_slots: int = 0
    loaded: int = 0
    wrong: list[str] = field(default_factory=list)
    ownerless: int = 0
    _fresh: list[tuple[int, _Blocks]] = field(default_factory=list)
    _certified: dict[_Blocks, _Pages] = field(default_factory=dict)
    _by_digest: dict[bytes, _Pages] = field(default_factory=dict)
    _payloads: dict[bytes, bytes] = field(default_factory=dict)


def audit(worker: Any, half: Any) -> Audit:
    """Start watching a worker half and the scheduler half of the same process, for the rest of their lives."""
    seen = Audit()
    pins = half._live.stores._pins
    try_pin, begin_step, end, report = pins.try_pin, worker.begin_step, worker._end, worker._copier._report

    def watched_pin(certificate: Certificate) -> bool:
        pinned = bool(try_pin(certificate))
        if pinned:
            seen._certified.pop(certificate.block_ids, None)
            seen._fresh.append((half._plan_number, certificate.block_ids))
            seen.ownerless += sum(block.ref_cnt == 1 for block in certificate.blocks)
        return pinned

    def watched_step(plan: StepPlan) -> None:
        # Blocks that were pinned while this plan was built may be filled by this very step: they wait for the next.
        for number, blocks in seen._fresh:
            if number < plan.number:
                seen._certified[blocks] = _pages(worker, blocks)
        seen._fresh = [entry for entry in seen._fresh if entry[0] >= plan.number]
        for job in plan.stores:
            _check_store(seen, worker, job.object)
        begin_step(plan)

    def watched_end(job: StoreJob | LoadJob, job_report: JobReport) -> None:
        if isinstance(job, LoadJob) and job_report.outcome is JobOutcome.DONE:
            for copy in job.objects:
                _check_load(seen, worker, copy)
        end(job, job_report)

    def watched_report(running: Running) -> JobReport:
        job_report: JobReport = report(running)
        if isinstance(running.job, StoreJob) and job_report.outcome is JobOutcome.DONE:
            _check_slots(seen, worker, running.job.object, running)
        return job_report

    pins.try_pin, worker.begin_step, worker._end, worker._copier._report = (
        watched_pin,
        watched_step,
        watched_end,
        watched_report,
    )
    return seen


def _run(buffer: Any, start: int, length: int) -> Any:
    part = buffer[start : start + length]
    return (part.cpu().numpy() if isinstance(part, torch.Tensor) else part).data


def _pages(worker: Any, blocks: _Blocks) -> _Pages:
    """A digest of each block's page."""
    buffers = worker._backend.buffers
    found = []
    for ids, layers in zip(blocks, worker._pages.groups, strict=True):
        for block in ids:
            state = hashlib.blake2b(digest_size=16)
            for segment in _segments(layers) if block != SKIP else ():
                start = segment.offset + block * segment.stride
                state.update(_run(buffers[segment.buffer], start, segment.length))
            found.append(b"" if block == SKIP else state.digest())
    return tuple(found)


def _segments(layers: Sequence[Any]) -> Iterable[Any]:
    return (segment for layer in layers for segment in layer.segments)


def _payload(worker: Any, blocks: _Blocks) -> bytes:
    """A digest of an object's whole payload, from the pages."""
    state = hashlib.blake2b(digest_size=16)
    for span in spans(blocks, worker._pages, 1 << 60):
        state.update(_run(worker._backend.buffers[span.buffer], span.page_offset, span.length))
    return state.digest()


def _check_store(seen: Audit, worker: Any, copy: ObjectCopy) -> None:
    seen.stored += 1
    now = _pages(worker, copy.blocks)
    certified = seen._certified.get(copy.blocks)
    if certified is None:
        seen.wrong.append(f"blocks {copy.blocks} are copied in the plan that first saw them")
    elif certified != now:
        seen.wrong.append(f"blocks {copy.blocks} changed between certification and copy")
    seen._by_digest[copy.digest] = now if certified is None else certified
    seen._payloads[copy.digest] = _payload(worker, copy.blocks)


def _check_slots(seen: Audit, worker: Any, stored: ObjectCopy, running: Running) -> None:
    """The bytes in the pool, for objects that are stored whole."""
    copy = running.copy
    assert copy is not None
    size, capacity = worker._copier._payload_bytes(stored), worker._copier._slice(running.pool).capacity
    state = hashlib.blake2b(digest_size=16)
    for piece, view in enumerate(copy.slices):
        if view is None:
            return
        state.update(view[: max(0, min(capacity, size - piece * capacity))].data)
    seen.in_slots += 1
    if state.digest() != seen._payloads.get(stored.digest):
        seen.wrong.append(f"object {stored.digest.hex()[:12]} lies in the pool other than it was certified")


def _check_load(seen: Audit, worker: Any, copy: ObjectCopy) -> None:
    certified = seen._by_digest.get(copy.digest)
    if certified is None:
        return
    seen.loaded += 1
    arrived = _pages(worker, copy.blocks)
    for was, came in zip(certified, arrived, strict=True):
        if came and was != came:
            seen.wrong.append(f"object {copy.digest.hex()[:12]} arrived in {copy.blocks} other than it was certified")
            return
