"""Counts what happens inside of vLLM and a connector, by wrapping their methods before the engine is made."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.probe.options import Options

_MAXIMA = ("store_ms_max", "stores_inflight_max", "pins_max")


class Watch:
    """Counters, and what of them belongs to a phase."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._before: Counter[str] = Counter()

    def begin_phase(self) -> None:
        for name in _MAXIMA:
            self.counts.pop(name, None)
        self._before = self.counts.copy()

    def of_phase(self) -> dict[str, float]:
        changes = {name: value - self._before[name] for name, value in sorted(self.counts.items())}
        return {name: round(value, 1) for name, value in changes.items() if value}

    def raise_to(self, name: str, value: float) -> None:
        self.counts[name] = max(self.counts[name], value)  # type: ignore[assignment]


def install(options: Options) -> Watch:
    """vLLM must have been imported."""
    watch = Watch()
    _count_preemptions(watch)
    if options.connector == "safe":
        _count_reports(watch)
        _Pinned(watch).install()
    elif options.connector == "stock":
        _StockStores(watch).install()
    return watch


def _wrap(owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


def _count_preemptions(watch: Watch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    def make(preempt: Callable[..., Any]) -> Callable[..., Any]:
        def counted(self: Any, *arguments: Any, **named: Any) -> Any:
            watch.counts["preemptions"] += 1
            return preempt(self, *arguments, **named)

        return counted

    _wrap(Scheduler, "_preempt_request", make)


def _count_reports(watch: Watch) -> None:
    """Jobs by how they ended."""
    from lmcache_mp_safe.scheduler.half import SchedulerHalf

    def make(reported: Callable[..., Any]) -> Callable[..., Any]:
        def counted(self: Any, report: Any) -> Any:
            for job in report.jobs:
                watch.counts[f"job {job.outcome.value}"] += 1
            return reported(self, report)

        return counted

    _wrap(SchedulerHalf, "reported", make)


class _Pinned:
    """Blocks that only a pin of this package kept: vLLM had given them up while a store still held them.

    Counts at the unpin `given_up_while_stored`, and as `reuses_prevented` those that vLLM would have handed out before:
    so many blocks were handed out since they were given up as its queue of free blocks then had before them.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._pins: Counter[int] = Counter()
        self._turn: dict[int, int] = {}  # block: number of handed-out blocks at which its turn would have come
        self._handed_out = 0

    def install(self) -> None:
        from vllm.v1.core.block_pool import BlockPool

        from lmcache_mp_safe.compat.requests import HostBlockPool

        _wrap(HostBlockPool, "pin", self._make_pin)
        _wrap(HostBlockPool, "unpin", self._make_unpin)
        _wrap(BlockPool, "free_blocks", self._make_free)
        _wrap(BlockPool, "get_new_blocks", self._make_get)

    def _make_pin(self, pin: Callable[..., Any]) -> Callable[..., Any]:
        def counted(pool: Any, blocks: Sequence[Any]) -> None:
            pin(pool, blocks)
            self._pins.update(block.block_id for block in blocks)
            self._watch.raise_to("pins_max", self._pins.total())

        return counted

    def _make_unpin(self, unpin: Callable[..., Any]) -> Callable[..., Any]:
        def counted(pool: Any, blocks: Sequence[Any]) -> None:
            for block in blocks:
                turn = self._turn.pop(block.block_id, None)
                if block.ref_cnt == 1:
                    self._watch.counts["given_up_while_stored"] += 1
                    self._watch.counts["reuses_prevented"] += turn is not None and turn < self._handed_out
            self._pins.subtract(block.block_id for block in blocks)
            unpin(pool, blocks)

        return counted

    def _make_free(self, free: Callable[..., Any]) -> Callable[..., Any]:
        def noted(pool: Any, blocks: Iterable[Any], *rest: Any, **named: Any) -> None:
            blocks = list(blocks)
            free(pool, blocks, *rest, **named)
            for block in blocks:
                if 0 < block.ref_cnt == self._pins[block.block_id]:
                    self._turn[block.block_id] = self._handed_out + pool.get_num_free_blocks()

        return noted

    def _make_get(self, get: Callable[..., Any]) -> Callable[..., Any]:
        def counted(pool: Any, number: int) -> Any:
            self._handed_out += number
            return get(pool, number)

        return counted


class _StockStores:
    """The stock connector's stores in flight, and blocks that vLLM hands out while one of them names them."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._inflight: list[tuple[Any, dict[int, int], float]] = []  # future, LMCache's group by block, since when

    def install(self) -> None:
        from lmcache.v1.multiprocess.transfer_context.worker_transfer import LMCacheDrivenTransferContext
        from vllm.v1.core.block_pool import BlockPool

        self._is_settled = LMCacheDrivenTransferContext._store_settled
        _wrap(LMCacheDrivenTransferContext, "submit_store", self._make_store)
        _wrap(LMCacheDrivenTransferContext, "submit_retrieve", self._make_retrieve)
        _wrap(BlockPool, "get_new_blocks", self._make_get)

    def _settle(self) -> None:
        for entry in [entry for entry in self._inflight if self._is_settled(entry[0])]:
            self._inflight.remove(entry)
            self._watch.raise_to("store_ms_max", (time.monotonic() - entry[2]) * 1e3)

    def _make_store(self, submit: Callable[..., Any]) -> Callable[..., Any]:
        def watched(context: Any, request: Any, key: Any, caches: Any, block_ids: Any, *rest: Any, **named: Any) -> Any:
            future = submit(context, request, key, caches, block_ids, *rest, **named)
            self._settle()
            groups = {block: group for group, ids in enumerate(block_ids) for block in ids if block}
            self._inflight.append((future, groups, time.monotonic()))
            self._watch.counts["stores"] += 1
            self._watch.raise_to("stores_inflight_max", len(self._inflight))
            return future

        return watched

    def _make_retrieve(self, submit: Callable[..., Any]) -> Callable[..., Any]:
        def counted(context: Any, *arguments: Any, **named: Any) -> Any:
            self._watch.counts["retrieves"] += 1
            return submit(context, *arguments, **named)

        return counted

    def _make_get(self, get: Callable[..., Any]) -> Callable[..., Any]:
        def watched(pool: Any, number: int) -> Any:
            blocks = get(pool, number)
            if self._inflight:
                self._settle()
            for _, groups, _ in self._inflight:
                for block in blocks:
                    if block.block_id in groups:
                        self._watch.counts["reused_while_stored"] += 1
                        self._watch.counts[f"reused_while_stored, group {groups[block.block_id]}"] += 1
            return blocks

        return watched
