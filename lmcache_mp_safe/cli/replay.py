"""`lmcache-mp-safe replay`: run the simulator's trace again and say whether it ends as it did."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import typer

_NO_TRACE = 2


def run_replay(path: Path) -> int:
    """Exit status: 0 if all is well, 1 if an invariant does not hold, 2 if the file is no trace."""
    if os.environ.get("PYTHONHASHSEED") != "0":  # vLLM iterates over sets of request ids
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | {"PYTHONHASHSEED": "0"})
    from lmcache_mp_safe.testing.sim.replay import replay
    from lmcache_mp_safe.testing.sim.trace import read_trace

    try:
        recorded = read_trace(path.read_text())
        outcome, difference = replay(recorded)
    except (OSError, ValueError) as error:
        typer.echo(f"{path}: {error}", err=True)
        return _NO_TRACE
    assert outcome.trace is not None
    command, result = outcome.trace.entries[-1]
    typer.echo(f"{len(outcome.trace.entries)} commands; the last one: {command}\n  {result}")
    typer.echo(f"recorded: {recorded.ending}\nnow:      {outcome.trace.ending}")
    typer.echo("every command came out as recorded" if difference is None else f"first difference: {difference}")
    return 1 if outcome.violation else 0
