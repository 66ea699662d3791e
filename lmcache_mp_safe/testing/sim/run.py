"""Runs seeds, and sums up what happened in them."""

from __future__ import annotations

import contextlib
import gc
import logging
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lmcache_mp_safe.testing.sim.invariants import InvariantError
from lmcache_mp_safe.testing.sim.script import Script
from lmcache_mp_safe.testing.sim.settings import Settings, draw
from lmcache_mp_safe.testing.sim.trace import Trace
from lmcache_mp_safe.testing.sim.world import World, world


@dataclass
class Outcome:
    """How one seed ended.

    Attributes:
        violation: name of the invariant that did not hold; empty if all did.
        trace: what happened.
    """

    seed: int
    violation: str = ""
    text: str = ""
    counts: Counter[str] = field(default_factory=Counter)
    trace: Trace | None = None
    seconds: float = 0.0


def run_seed(seed: int, steps: int, settings: Settings | None = None) -> Outcome:
    """One world from its beginning to its rest."""
    chosen = draw(seed) if settings is None else settings
    return run_commands(chosen, Script(chosen).commands(steps))


def run_commands(settings: Settings, commands: Iterable[str]) -> Outcome:
    """A world with these commands."""
    with _collected_at_the_end():
        return _run_commands(settings, commands)


@contextlib.contextmanager
def _collected_at_the_end() -> Iterator[None]:
    """Garbage is looked for once, and only in what the world has made: vLLM's modules take longer than a world."""
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def _run_commands(settings: Settings, commands: Iterable[str]) -> Outcome:
    outcome = Outcome(settings.seed)
    begun = time.perf_counter()
    made: World | None = None
    try:
        with world(settings) as made:
            for command in commands:
                made.do(command)
    except InvariantError as error:
        outcome.violation, outcome.text = error.name, error.text
    if made is not None:
        outcome.counts, outcome.trace, segment = _counts(made), made.trace, made.memory.name
        made = None
        if not outcome.violation and is_mapped(segment):
            outcome.violation, outcome.text = "leak", "the server's pool is still mapped"
        if outcome.violation:
            outcome.trace.ending = f"{outcome.violation}: {outcome.text}"
    outcome.seconds = time.perf_counter() - begun
    return outcome


def is_mapped(segment: str) -> bool:
    """Whether this process maps the segment, with everything gone that nobody needs any more."""

    def mapped() -> bool:
        return segment in Path("/proc/self/maps").read_text()

    return mapped() and bool(gc.collect() + 1) and mapped()


def _counts(made: World) -> Counter[str]:
    counted = {} if made.half is None else {name: int(amount) for name, amount in made.half.counters.items()}
    faults = {f"fault: {name}": count for name, count in made.network.counts.items()}
    # What the simulator has seen itself goes before what the connector says of itself under the same name.
    return Counter({**counted, **made.counts, **made.jobs.counts, **faults})


def run_seeds(seeds: Iterable[int], steps: int, jobs: int) -> Iterator[Outcome]:
    """Many, several at a time, as they end. The hash seed is fixed: vLLM iterates over sets of request ids."""
    tasks = [(seed, steps) for seed in seeds]
    if jobs == 1:
        yield from map(_run, tasks)
        return
    os.environ["PYTHONHASHSEED"] = "0"
    with multiprocessing.get_context("spawn").Pool(jobs, _quiet) as pool:
        yield from pool.imap_unordered(_run, tasks, chunksize=4)


def _quiet() -> None:
    logging.disable(logging.INFO)


def _run(task: tuple[int, int]) -> Outcome:
    outcome = run_seed(*task)
    if not outcome.violation:
        outcome.trace = None  # it would only travel
    return outcome


@dataclass
class Summary:
    """All seeds together."""

    seeds: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    failed: list[tuple[int, str, str, Path]] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, outcome: Outcome, traces: Path) -> None:
        self.seeds += 1
        self.counts.update(outcome.counts)
        if outcome.violation:
            path = traces / f"seed-{outcome.seed}.txt"
            if outcome.trace is not None:
                outcome.trace.write(path)
            self.failed.append((outcome.seed, outcome.violation, outcome.text, path))

    def rows(self) -> list[tuple[str, str]]:
        """Name and value, in the order in which they are printed."""
        counts = self.counts
        kinds = Counter(violation for _, violation, _, _ in self.failed)
        shown = (
            "steps",
            "steps with faults",
            "requests",
            "preemptions",
            "drafts",
            "loads",
            "hits",
            "stores",
            "objects_stored",
            "dead ends of vLLM",
        )
        rows = [("seeds", f"{self.seeds:,}"), *((name, f"{counts[name]:,}") for name in shown)]
        rows += [(name, f"{counts[name]:,}") for name in sorted(counts) if name.startswith(("fault: ", "job ended: "))]
        wrong = sum(kinds[name] for name in kinds if name not in ("hang", "leak"))
        rows += [("wrong", str(wrong)), ("hangs", str(kinds["hang"])), ("leaks", str(kinds["leak"]))]
        return [*rows, ("seconds", f"{self.seconds:,.0f}")]
