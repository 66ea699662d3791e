"""Time of the scheduler hooks in the thread of vLLM's scheduler, against the stock connector's in the same steps."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcache_mp_safe.bench.installed import missing_packages
from lmcache_mp_safe.bench.runner import Check, Result, Row

STEP_TOKENS = 8192
DECODE_STEPS = 64
MOST = 0.2  # of stock's time, where it matters most
REQUESTS = (1, 64, 256)
PROMPTS = (1_000, 32_000, 100_000)
_SMALL_WORK = 3_000_000  # tokens: lives smaller than this are repeated


@dataclass(frozen=True)
class Life:
    """Microseconds in hooks of one connector over the lives of all requests.

    Attributes:
        admission: a request: questions for a hit, and the allocation.
        prefill: a step that computes a part of a prompt, while the requests before it decode.
        decode: a step in which every request decodes and none is stored any more.
        finish: a request.
        whole: the mean of all steps, with everything in it.
    """

    admission: float
    prefill: float
    decode: float
    finish: float
    whole: float


def lives(shape: Any, requests: int, length: int, delay: int) -> dict[str, Life]:
    """Both connectors through the same lives of so many requests: each arrives when the one before is computed."""
    from lmcache_mp_safe.bench.connectors import sides
    from lmcache_mp_safe.bench.engine_loop import EngineLoop, prompt

    longest = length + requests * (length // STEP_TOKENS + 8) + 8 * DECODE_STEPS
    blocks = 64 + requests * shape.blocks_for(longest)
    both = sides(shape, blocks, STEP_TOKENS, delay)
    engine = EngineLoop(shape, both, blocks, STEP_TOKENS, longest)
    running = []
    gc.collect()
    gc.disable()  # a collection looks at every block of the pool, in whoever's hook it happens
    try:
        engine.phase = "between"
        for number in range(requests):
            running.append(engine.add(prompt(length, number)))
            while engine.computing:
                engine.step()
        while any(side.busy() for side in both):
            engine.step()
        engine.phase = "decode"
        for _ in range(DECODE_STEPS):
            engine.step()
        engine.phase = "end"
        for request in running:
            engine.finish(request)
        engine.drain()
    finally:
        gc.enable()
    if both[0].trouble:
        raise RuntimeError(f"{requests} x {length} tokens on {shape.name}: {both[0].trouble}")
    for side in both:
        side.connector.shutdown()
    return {
        side.name: _life(watch.spent, engine.steps, requests) for side, watch in zip(both, engine.watches, strict=True)
    }


def _life(spent: Mapping[str, int], steps: Mapping[str, int], requests: int) -> Life:
    def each(phase: str, count: int) -> float:
        return spent.get(phase, 0) / 1e3 / max(1, count)

    return Life(
        admission=each("admission", requests),
        prefill=each("prefill", steps.get("prefill", 0)),
        decode=each("decode", steps.get("decode", 0)),
        finish=each("finish", requests),
        whole=sum(spent.values()) / 1e3 / sum(steps.values()),
    )


class SchedulerHooks:
    key = "scheduler-hooks"
    description = (
        "CPU time of the scheduler's thread in get_num_new_matched_tokens, update_state_after_alloc,"
        " build_connector_meta, update_connector_output and request_finished, of this connector and of the stock"
        " one in the same steps, with the same stub client behind both: its calls cost nothing and are answered"
        " one step later, every lookup with a miss. Real vLLM requests, block hashes and KV cache manager; steps"
        " of 8,192 tokens. A request arrives when the prompt before it is computed, and decodes until all have"
        " decoded 64 steps together. Admission and finish are microseconds a request, prefill and decode"
        " microseconds a step; life is the mean of all steps with everything in it."
    )

    def plot(self, result: Result, path: Path) -> None:
        from lmcache_mp_safe.bench.plots import plot_pairs

        plot_pairs(result, "life us", "life, stock us", path)

    def can_run(self) -> str | None:
        return missing_packages("vllm", "lmcache", "matplotlib")

    def run(self, quick: bool) -> Iterator[Row]:
        from lmcache_mp_safe.bench.shapes import ATTENTION, HYBRID

        cells = [(2, 4_000)] if quick else [(requests, length) for length in PROMPTS for requests in REQUESTS]
        for shape in (HYBRID, ATTENTION):
            for requests, length in cells:
                yield from self._cell(shape, requests, length, 1)
        if not quick:
            yield from self._cell(HYBRID, 64, 32_000, 4)

    def _cell(self, shape: Any, requests: int, length: int, delay: int) -> Iterator[Row]:
        repeats = 3 if requests * length <= _SMALL_WORK else 1
        found = [lives(shape, requests, length, delay) for _ in range(repeats)]
        late = f", answers after {delay} steps" if delay > 1 else ""
        yield row(f"{shape.name}, {requests} x {length:,} tokens{late}", found, (requests, length) == (256, 100_000))


def row(name: str, found: list[dict[str, Life]], held_to_it: bool) -> Row:
    """Medians of the repeats, ours and stock's side by side."""
    values: dict[str, Any] = {}
    ratios: dict[str, float] = {}
    for phase in ("admission", "prefill", "decode", "finish", "whole"):
        title = "life" if phase == "whole" else phase
        ours, stock = (statistics.median(getattr(life[side], phase) for life in found) for side in ("ours", "stock"))
        values[f"{title} us"], values[f"{title}, stock us"] = round(ours, 1), round(stock, 1)
        ratios[title] = ours / stock if stock else 0.0
    values["decode of stock's"], values["life of stock's"] = ratios["decode"], ratios["life"]
    checks = tuple(Check(f"{title}, of stock's", ratios[title], "<=", MOST) for title in ("decode", "life"))
    return Row(name, values, checks if held_to_it else ())
