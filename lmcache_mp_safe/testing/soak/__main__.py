"""The command: `python -m lmcache_mp_safe.testing.soak --minutes 20`."""

from __future__ import annotations

import enum
import json
import os
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.console import Console

from lmcache_mp_safe.testing.engine import ENVIRONMENT, Speculation
from lmcache_mp_safe.testing.soak.arm import Plan, run_arm
from lmcache_mp_safe.testing.soak.report import ArmReport, as_json, as_table

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
_LOG_COLUMNS = 180  # where there is no terminal to ask


class Arm(enum.StrEnum):
    """Ways of speculation."""

    NONE = "none"
    NGRAM = "ngram"
    MTP = "mtp"


@app.command()
def soak(
    minutes: Annotated[float, typer.Option(min=0.1, help="For all arms together, without their starts.")] = 20.0,
    speculation: Annotated[list[Arm] | None, typer.Option(help="An arm; may be repeated. Default: none, mtp.")] = None,
    seed: Annotated[int, typer.Option(help="Decides what users say and when the server fails.")] = 0,
    mutant: Annotated[bool, typer.Option(help="Load wrong states on purpose: must end with status 1.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")] = None,
) -> None:
    """Users, a server that fails now and then, a small pool, and every answer against a recompute's.

    Exit status 1 if an answer diverged, if no request was hit, if a block, pin, lock, thread, descriptor or mapping was
    left over, or if the engine or the server kept growing.
    """
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    chosen = speculation or [Arm.NONE, Arm.MTP]
    plans = [Plan(cast(Speculation, str(arm)), 60 * minutes / len(chosen), seed, mutant) for arm in chosen]
    arms = [_in_a_process(plan) for plan in plans]
    console = Console()
    if not console.is_terminal:
        console = Console(width=_LOG_COLUMNS)
    console.print(as_table(arms))
    for arm in arms:
        for fault in arm.faults:
            console.print(f"{arm.speculation}: {fault}", markup=False, highlight=False)
    result = as_json(arms)
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")
    raise typer.Exit(0 if result["ok"] else 1)


def _in_a_process(plan: Plan) -> ArmReport:
    """An engine takes over its process; one that dies (a SIGBUS, say) must not take the report with it."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        try:
            return process.submit(run_arm, plan).result()
        except BrokenProcessPool as error:
            return ArmReport(plan.speculation, failure=f"the engine's process died: {error}")


if __name__ == "__main__":
    app()
