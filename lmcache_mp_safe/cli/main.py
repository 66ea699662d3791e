"""`lmcache-mp-safe`: the commands."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


class Compared(enum.StrEnum):
    """Connectors that the demo can run beside ours."""

    STOCK = "stock"


@app.callback()
def main() -> None:
    """KV cache for vLLM in an LMCache server, without changing what the model says."""


@app.command()
def demo(
    sessions: Annotated[int, typer.Option(min=1, help="Conversations that share a system prompt.")] = 3,
    turns: Annotated[int, typer.Option(min=2, help="Turns of each conversation.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens generated for each request.")] = 16,
    compare: Annotated[
        Compared | None, typer.Option(help="Run another connector on the same requests, and report what it does.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result to this file.")] = None,
) -> None:
    """Real engines, a real LMCache server, a tiny hybrid model: every external hit against recomputing.

    Exit status 1 if an answer diverged, if an arm had no external hit, or if a pin or a lock was left over.
    """
    from lmcache_mp_safe.cli.demo import DemoOptions, run_demo

    raise typer.Exit(run_demo(DemoOptions(sessions, turns, max_tokens, compare is Compared.STOCK, json_file)))


if __name__ == "__main__":
    app()
