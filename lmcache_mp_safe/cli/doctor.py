"""`doctor`: measure, judge, show."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from lmcache_mp_safe.doctor import render
from lmcache_mp_safe.doctor.checks import diagnose
from lmcache_mp_safe.doctor.findings import ExitStatus, exit_status
from lmcache_mp_safe.doctor.gather import Options, gather

STDOUT = Path("-")
_LOG_COLUMNS = 120  # where there is no terminal to ask


@dataclass(frozen=True)
class DoctorOptions:
    """What the command line says."""

    look: Options
    json_file: Path | None
    strict: bool


def without_command(arguments: list[str]) -> tuple[str, ...]:
    """Arguments of `vllm serve`, also where the whole command was pasted."""
    return tuple(arguments[2:] if arguments[:2] == ["vllm", "serve"] else arguments)


def run_doctor(options: DoctorOptions) -> int:
    """Returns the exit status."""
    facts = gather(options.look)
    sections = diagnose(facts)
    if options.json_file is not None:
        text = json.dumps(render.as_json(facts, sections), indent=1) + "\n"
        if options.json_file == STDOUT:
            sys.stdout.write(text)
        else:
            options.json_file.write_text(text)
    if options.json_file != STDOUT:
        console = Console()
        if not console.is_terminal:
            console = Console(width=_LOG_COLUMNS)
        console.print(render.page(sections))
        console.print(render.summary(sections))
    if facts.probe.usage_error:
        return ExitStatus.USAGE
    return exit_status([finding for findings in sections.values() for finding in findings], strict=options.strict)
