"""Watches one in-process engine: page bytes when they were certified, when they were copied, and when they were loaded.

A checksum cannot tell that a block was reused between its certification and its copy: it would vouch for the wrong
bytes. This does. A page is remembered at the first step after its block was certified and pinned (by then the step that
fills it has run), and must still be the same when it is copied, and again when it arrives in some other block.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lmcache_mp_safe.contract import SKIP, ObjectCopy, StepPlan
from lmcache_mp_safe.scheduler.certify import Certificate
from lmcache_mp_safe.testing.engine import Engine

_Blocks = tuple[tuple[int, ...], ...]
_Pages = tuple[bytes, ...]


@dataclass
class Audit:
    """What was seen.

    Attributes:
        stored: objects that were copied out; `loaded`: objects that were copied in and known from a store.
        wrong: descriptions of pages that were not what they should be.
        ownerless: blocks that had no other owner when they were pinned: without the pin vLLM could have reused them.
    """

    stored: int = 0
    loaded: int = 0
    wrong: list[str] = field(default_factory=list)
    ownerless: int = 0
    _fresh: list[tuple[int, _Blocks]] = field(default_factory=list)
    _certified: dict[_Blocks, _Pages] = field(default_factory=dict)
    _by_digest: dict[bytes, _Pages] = field(default_factory=dict)


def audit(engine: Engine) -> Audit:
    """Start watching; the engine keeps the audit for the rest of its life."""
    seen = Audit()
    worker, half = engine.worker_connector.worker_half, engine.connector.scheduler_half
    pins = half._live.stores._pins
    try_pin, begin_step = pins.try_pin, worker.begin_step

    def watched_pin(certificate: Certificate) -> bool:
        pinned = bool(try_pin(certificate))
        if pinned:
            seen._certified.pop(certificate.block_ids, None)
            seen._fresh.append((half._plan_number, certificate.block_ids))
            seen.ownerless += sum(page.block.ref_cnt == 1 for page in certificate.pages)
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
        for load in plan.loads:
            for copy in load.objects:
                _check_load(seen, worker, copy)

    pins.try_pin, worker.begin_step = watched_pin, watched_step
    return seen


def _pages(worker: Any, blocks: _Blocks) -> _Pages:
    buffers = worker._backend.buffers
    found = []
    for ids, layers in zip(blocks, worker._pages.groups, strict=True):
        for block in ids:
            state = hashlib.blake2b(digest_size=16)
            for segment in _segments(layers):
                start = segment.offset + block * segment.stride
                state.update(buffers[segment.buffer][start : start + segment.length])
            found.append(b"" if block == SKIP else state.digest())
    return tuple(found)


def _segments(layers: Sequence[Any]) -> Iterable[Any]:
    return (segment for layer in layers for segment in layer.segments)


def _check_store(seen: Audit, worker: Any, copy: ObjectCopy) -> None:
    seen.stored += 1
    now = _pages(worker, copy.blocks)
    certified = seen._certified.get(copy.blocks)
    if certified is None:
        seen.wrong.append(f"blocks {copy.blocks} are copied in the plan that first saw them")
    elif certified != now:
        seen.wrong.append(f"blocks {copy.blocks} changed between certification and copy")
    seen._by_digest[copy.digest] = now if certified is None else certified


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
