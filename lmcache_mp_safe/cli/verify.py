"""The command `verify`: arguments in, exit status out."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lmcache_mp_safe.errors import SafeError
from lmcache_mp_safe.verify.client import Client
from lmcache_mp_safe.verify.judge import EXIT_STATUS, Verdict
from lmcache_mp_safe.verify.page import page
from lmcache_mp_safe.verify.report import as_values, show
from lmcache_mp_safe.verify.run import Result, Settings, run, targets
from lmcache_mp_safe.verify.self_test import self_test
from lmcache_mp_safe.verify.traffic import Session, chats, generated

TROUBLE = 2
KEY_VARIABLE, BASELINE_KEY_VARIABLE = "OPENAI_API_KEY", "BASELINE_API_KEY"
_LOG_COLUMNS = 120


@dataclass(frozen=True)
class VerifyOptions:
    """What the command line says."""

    url: str | None
    baseline_url: str | None
    model: str | None
    baseline_model: str | None
    settings: Settings
    seed: int
    words: int
    chats: Path | None
    timeout_s: float
    json_file: Path | None
    html_file: Path | None
    self_test: bool


def run_verify(options: VerifyOptions) -> int:
    """Ask, judge, report; returns the exit status."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_LOG_COLUMNS)
    if options.self_test:
        return _self_test(console, options.json_file)
    if options.url is None:
        console.print("verify: --url is missing: the address of the server under test", markup=False)
        return TROUBLE
    try:
        sessions = chats(options.chats) if options.chats is not None else generated(options.seed, options.words)
        result = asyncio.run(_run(options, options.url, sessions))
    except SafeError as error:
        console.print(f"verify: {error}", markup=False)
        return TROUBLE
    show(console, result)
    try:
        _write(options, result)
    except OSError as error:
        console.print(f"verify: what was measured could not be written: {error}", markup=False)
        return TROUBLE
    verdict = result.judgement().verdict
    return TROUBLE if result.ended_early and verdict is not Verdict.CORRUPT else EXIT_STATUS[verdict]


def _write(options: VerifyOptions, result: Result) -> None:
    if options.json_file is not None:
        options.json_file.write_text(json.dumps(as_values(result), indent=1, allow_nan=False) + "\n")
    if options.html_file is not None:
        options.html_file.write_text(page(result))


async def _run(options: VerifyOptions, url: str, sessions: Iterable[Session]) -> Result:
    key = os.environ.get(KEY_VARIABLE, "")
    baseline_url, baseline_key = options.baseline_url or url, os.environ.get(BASELINE_KEY_VARIABLE, key)
    async with (
        Client(url, key=key, timeout_s=options.timeout_s) as subject,
        Client(baseline_url, key=baseline_key, timeout_s=options.timeout_s) as baseline,
    ):
        tested, measure = await targets(subject, baseline, options.model, options.baseline_model)
        return await run(tested, measure, sessions, options.settings, _say)


def _say(what: str, done: int) -> None:
    print(f"{done} prompts done; asking: {what}", file=sys.stderr, flush=True)


def _self_test(console: Console, json_file: Path | None) -> int:
    trials = asyncio.run(self_test())
    table = Table(title="one answer among many shows:")
    for column in ("what", "expected", "found", ""):
        table.add_column(column)
    for trial in trials:
        what = "nothing" if trial.fault is None else trial.fault.value
        table.add_row(what, trial.expected, trial.found, "ok" if trial.ok else "NOT OK")
    console.print(table)
    ok = all(trial.ok for trial in trials)
    if json_file is not None:
        rows = [{"fault": trial.fault, "expected": trial.expected, "found": trial.found} for trial in trials]
        json_file.write_text(json.dumps({"ok": ok, "trials": rows}, indent=1) + "\n")
    return 0 if ok else 1
