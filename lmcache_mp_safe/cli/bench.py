"""The command `bench`: the measurements that need no GPU and no checkout."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from lmcache_mp_safe.bench.cases import CASES
from lmcache_mp_safe.bench.runner import exit_status, results_of


@dataclass(frozen=True)
class BenchOptions:
    """What the command line says."""

    keys: Sequence[str]
    listed: bool
    quick: bool
    strict: bool
    out: Path | None
    json_file: Path | None


def run_bench(options: BenchOptions) -> int:
    """Run the cases, or list them; returns the exit status.

    Raises:
        typer.BadParameter: there is no such case.
    """
    known = {case.key: case for case in CASES}
    if options.listed:
        for case in CASES:
            reason = case.can_run()
            typer.echo(f"{case.key:<16} {case.description}{f' [cannot run here: {reason}]' if reason else ''}")
        return 0
    unknown = [key for key in options.keys if key not in known]
    if unknown:
        raise typer.BadParameter(f"no case {', '.join(unknown)}; there are {', '.join(known)}")
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    os.environ.setdefault("LMCACHE_DISABLE_BANNER", "1")
    cases = [known[key] for key in options.keys or known]
    command = f"lmcache-mp-safe {shlex.join(sys.argv[1:])}"
    results = results_of(cases, options.out, options.quick, command)
    if options.json_file is not None:
        options.json_file.write_text(json.dumps([dataclasses.asdict(result) for result in results], indent=1) + "\n")
    return exit_status(results, options.strict)
