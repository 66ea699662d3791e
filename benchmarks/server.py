"""End to end through a real `lmcache server`: this package's wire and worker half, against the stock protocol."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks import stock
from benchmarks.gpu_world import Pages, best_device, hybrid, no_gpu, open_warm, worker_half
from lmcache_mp_safe.bench.measure import GB, MS, Times
from lmcache_mp_safe.bench.runner import Check, Row, WrongBytesError
from lmcache_mp_safe.geometry.payload import ObjectLayout
from lmcache_mp_safe.testing.server import LMCacheServer

COUNTS = {1: 6, 2: 5, 8: 4, 32: 4}  # chunks at once: repeats, the first of which is not counted
POOL_GIB = 40  # none of it is used twice


def stock_times(worker: stock.StockWorker, layers: dict[str, torch.Tensor], count: int, repeats: int) -> Times:
    times = Times()
    for repeat in range(repeats):
        first = list(range(1, 1 + count * stock.CHUNK_BLOCKS))
        second = [block + len(first) for block in first]
        tokens = tuple(torch.randint(0, 10**6, (count * stock.CHUNK_TOKENS,)).tolist())
        stored = worker.store(tokens, first)
        request, looked = worker.lookup(tokens)
        loaded = worker.retrieve(tokens, request, second)
        for name, layer in layers.items():
            last = -1 if name.startswith("recurrent") else 0
            if not torch.equal(layer[first[last:]], layer[second[last:]]):
                raise WrongBytesError(f"the stock server: {name}, {count} chunks")
            layer[second] = 0
        if repeat:
            times.store.append(stored)
            times.lookup.append(looked)
            times.load.append(loaded)
    return times


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """For child processes started meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def loaded_bytes(count: int) -> int:
    """All attention chunks, but only the last state."""
    geometry = hybrid()
    return count * sum(geometry.groups[0]) * geometry.blocks[0] + sum(geometry.groups[1])


class Server:
    key = "server"
    description = (
        "Store and load of 1, 2, 8 and 32 hybrid chunks of 184 MB through an LMCache server: the wire and the worker"
        " half with checksums and a server that sees no GPU, its pool page-locked by earlier use, against the stock"
        " protocol (CUDA IPC) with its server. A load is all attention chunks and the last state, from the retrieve to"
        " the checked bytes."
    )

    def can_run(self) -> str | None:
        if reason := no_gpu((POOL_GIB + 1) << 30):
            return reason
        return None if find_spec("lmcache") else "lmcache is not installed"

    def run(self, quick: bool) -> Iterator[Row]:
        counts = {1: 3, 2: 3} if quick else COUNTS
        pool_gib = 4 if quick else POOL_GIB
        most = max(counts)
        from benchmarks.ours import Ours  # not earlier: LMCache takes seconds to import

        torch.cuda.init()  # before the environment hides the device from the server
        pages = Pages(hybrid(), most)
        layers = stock.layers_of(2 * most * stock.CHUNK_BLOCKS + 1)
        object_layout = ObjectLayout.for_payload([sum(hybrid().groups[0]) * hybrid().blocks[0]])
        with contextlib.ExitStack() as stack:
            theirs = stack.enter_context(LMCacheServer(l1_size_gb=pool_gib, shm_name="", flags=stock.FLAGS))
            with environment(CUDA_VISIBLE_DEVICES=""):
                ours = stack.enter_context(LMCacheServer(l1_size_gb=pool_gib))
            kind, device = best_device()
            half = stack.enter_context(worker_half(pages, device, open_pool=open_warm(pool_gib << 30)))
            worker = Ours(ours.url, pages, half, object_layout)
            stack.callback(worker.close)
            reference = stock.StockWorker(theirs.url, layers)
            for count, repeats in counts.items():
                yield from compare(
                    count, kind, stock_times(reference, layers, count, repeats), worker.measure(count, repeats)
                )


def compare(count: int, kind: str, theirs: Times, ours: Times) -> Iterator[Row]:
    stored, loaded = count * hybrid().payload_bytes, loaded_bytes(count)
    middle = statistics.median
    rates = [(stored / middle(times.store), loaded / middle(times.load)) for times in (theirs, ours)]
    for name, times, (store, load) in zip(("stock", f"ours ({kind})"), (theirs, ours), rates, strict=True):
        values: dict[str, Any] = {
            "store ms": middle(times.store) * MS,
            "store GB/s": store / GB,
            "lookup ms": middle(times.lookup) * MS,
            "load ms": middle(times.load) * MS,
            "load GB/s": load / GB,
        }
        checks: tuple[Check, ...] = ()
        if times is ours:
            checks = (
                Check("store, of stock's", store / rates[0][0], ">=", 1.0),
                Check("load, of stock's", load / rates[0][1], ">=", 1.0),
            )
        yield Row(f"{count} chunks, {name}", values, checks)
