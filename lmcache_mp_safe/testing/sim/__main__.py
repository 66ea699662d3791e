"""python -m lmcache_mp_safe.testing.sim --seeds A:B --steps N --jobs J"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from lmcache_mp_safe.testing.sim.run import Summary, run_seeds

_REPORT_EVERY = 100  # seeds


def main(
    seeds: Annotated[str, typer.Option(help="First seed and the one after the last.")] = "0:20",
    steps: Annotated[int, typer.Option(min=1, help="Steps of each seed, before it is brought to rest.")] = 200,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    traces: Annotated[Path, typer.Option(help="Where failing seeds leave their traces.")] = Path("build/traces"),
) -> None:
    """Run seeds; exit status 1 if an invariant did not hold in one of them."""
    if os.environ.get("PYTHONHASHSEED") != "0":  # vLLM iterates over sets of request ids
        os.execve(
            sys.executable, [sys.executable, "-m", __package__, *sys.argv[1:]], os.environ | {"PYTHONHASHSEED": "0"}
        )
    begin, end = (int(part) for part in seeds.split(":"))
    summary, begun = Summary(), time.monotonic()
    for outcome in run_seeds(range(begin, end), steps, jobs):
        summary.add(outcome, traces)
        if outcome.violation:
            seed, violation, text, path = summary.failed[-1]
            typer.echo(f"seed {seed}: {violation}: {text}\n  lmcache-mp-safe replay {path}")
        if summary.seeds % _REPORT_EVERY == 0:
            typer.echo(f"{summary.seeds:,} seeds, {summary.counts['steps']:,} steps, {len(summary.failed)} failed")
        sys.stdout.flush()
    summary.seconds = time.monotonic() - begun
    typer.echo(f"seeds {begin} to {end - 1}, {steps} steps of each with faults, {jobs} processes")
    for name, value in summary.rows():
        typer.echo(f"{name:<28}{value:>14}")
    raise typer.Exit(1 if summary.failed else 0)


if __name__ == "__main__":
    typer.run(main)
