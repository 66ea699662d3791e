"""The demo: the main job on real input, on a machine without a GPU.

For each way of speculation: an engine holds several conversations without any reuse, which gives the reference answers;
then it answers every turn again with vLLM's prefix cache emptied before it, so that only the connector can know the
prefix; then a second engine process, which shares nothing with the first but the server, does the same.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from lmcache_mp_safe.testing.engine import Engine, EngineSpec, EngineStuckError, Speculation
from lmcache_mp_safe.testing.engine_worker import EngineCallError, EngineDiedError, EngineProcess
from lmcache_mp_safe.testing.models import write_model
from lmcache_mp_safe.testing.oracle import Report, Session, Turn, check_external, recompute, sessions
from lmcache_mp_safe.testing.server import LMCacheServer

ARMS: tuple[Speculation, ...] = ("none", "ngram", "mtp")

_SALT = "demo"
_LOG_COLUMNS = 120  # where there is no terminal to ask
# A step takes a little more than one block of 640 tokens, or several: recurrent states are left at different places.
_STEP_TOKENS = 1300


@dataclass(frozen=True)
class DemoOptions:
    """What the command line says."""

    sessions: int
    turns: int
    max_tokens: int
    compare_stock: bool
    json_file: Path | None


@dataclass
class ArmResult:
    """One way of speculation.

    Attributes:
        second: what the second engine process found.
        leaked: what was still held at the end, by engine; empty if nothing was.
        failure: why the arm could not be run to its end.
    """

    spec: str
    report: Report = field(default_factory=Report)
    second: Report = field(default_factory=Report)
    leaked: dict[str, dict[str, int]] = field(default_factory=dict)
    seconds: float = 0.0
    failure: str = ""

    @property
    def ok(self) -> bool:
        reports = (self.report, self.second)
        return (
            not self.failure
            and not self.leaked
            and all(report.external_hits and not report.divergent for report in reports)
        )

    def row(self) -> dict[str, Any]:
        return {
            "spec": self.spec,
            **self.report.summary(),
            "second_engine": self.second.summary(),
            "leaked": self.leaked,
            "seconds": round(self.seconds, 1),
            "failure": self.failure,
        }


def run_demo(options: DemoOptions) -> int:
    """Run all arms; returns the exit status."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_LOG_COLUMNS)
    with tempfile.TemporaryDirectory(prefix="lmcache-mp-safe-demo-") as folder:
        model = write_model("hybrid", Path(folder) / "model")
        with LMCacheServer(l1_size_gb=1) as server, _progress(console) as progress:
            arms = [_run_arm(arm, model, server, options, progress) for arm in ARMS]
        stock = [_run_stock(arm, model, options, console) for arm in ARMS] if options.compare_stock else []
    ok = all(arm.ok for arm in arms)
    _show(console, "LMCacheMPSafeConnector", arms)
    if stock:
        _show(console, "LMCacheMPConnector (stock), for comparison", stock)
    console.print("every external hit equals recomputing" if ok else "[bold red]not ok: see the table above")
    if options.json_file is not None:
        result: dict[str, Any] = {"ok": ok, "arms": [arm.row() for arm in arms]}
        if stock:
            result["stock"] = [arm.row() for arm in stock]
        options.json_file.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if ok else 1


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        yield progress


def _say(progress: Progress, task: TaskID, arm: str, what: str) -> None:
    progress.update(task, description=f"{arm:<6} {what}")
    if not progress.console.is_terminal:  # there the bars are drawn only at the end
        progress.console.print(f"{arm}: {what}")


def _spec(arm: Speculation, model: Path, server: LMCacheServer, connector: Any) -> EngineSpec:
    return EngineSpec(
        str(model),
        kind="hybrid",
        speculation=arm,
        connector=connector,
        connector_extra={"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server.port},
        max_num_batched_tokens=_STEP_TOKENS,
    )


def _run_arm(
    arm: Speculation, model: Path, server: LMCacheServer, options: DemoOptions, progress: Progress
) -> ArmResult:
    result, started = ArmResult(arm), time.monotonic()
    requests = options.sessions * options.turns
    task = progress.add_task(f"{arm:<6} starting", total=3 * requests)
    spec = _spec(arm, model, server, "safe")
    try:
        turns = _first_engine(spec, arm, options, result, progress, task)
        _second_engine(spec, arm, turns, result, progress, task)
    except (EngineDiedError, EngineCallError, EngineStuckError, ValueError) as error:
        result.failure = str(error)
    result.seconds = time.monotonic() - started
    _say(progress, task, arm, "done")
    return result


def _first_engine(
    spec: EngineSpec, arm: Speculation, options: DemoOptions, result: ArmResult, progress: Progress, task: TaskID
) -> list[Turn]:
    with EngineProcess(spec) as engine:
        _say(progress, task, arm, "recomputing")
        # Salts of this arm alone: what one arm stored is no hit of another.
        turns = recompute(engine, conversations_of(options), options.max_tokens, salt=f"reference-{arm}")
        progress.advance(task, len(turns))
        _say(progress, task, arm, "external hits")
        result.report = check_external(engine, turns, salt=f"{_SALT}-{arm}", progress=lambda *_: progress.advance(task))
        _note_leaks(engine, "first engine", result)
    return turns


def _second_engine(
    spec: EngineSpec, arm: Speculation, turns: Sequence[Turn], result: ArmResult, progress: Progress, task: TaskID
) -> None:
    _say(progress, task, arm, "second engine")
    with EngineProcess(spec, environment={"PYTHONHASHSEED": None}) as engine:
        result.second = check_external(engine, turns, salt=f"{_SALT}-{arm}", progress=lambda *_: progress.advance(task))
        _note_leaks(engine, "second engine", result)


def conversations_of(options: DemoOptions) -> tuple[Session, ...]:
    """Conversations whose system prompt is longer than two blocks: with MTP a hit ends a block earlier."""
    return sessions(seed=0, count=options.sessions, turns=options.turns, system_tokens=1400)


def _note_leaks(engine: EngineProcess, name: str, result: ArmResult) -> None:
    engine.drain()
    left = {what: count for what, count in engine.run(held_after_drain).items() if count}
    if left:
        result.leaked[name] = left


def held_after_drain(engine: Engine) -> dict[str, int]:
    """What is still held by an engine that has nothing to do; all zero unless something leaked."""
    half = engine.connector.scheduler_half
    engine.step()
    return {
        "blocks": engine.held_blocks(),
        "pins": half.pinned_blocks,
        **dataclasses.asdict(half.wire.held()),
    }


def _run_stock(arm: Speculation, model: Path, options: DemoOptions, console: Console) -> ArmResult:
    """The stock connector on the same requests, with a server of its own and the flags that it needs."""
    result, started = ArmResult(arm), time.monotonic()
    console.print(f"stock connector, {arm} …")
    flags = ("--supported-transfer-mode", "auto", "--chunk-size", "640", "--separate-object-groups")
    with LMCacheServer(l1_size_gb=1, flags=flags) as server:
        try:
            with EngineProcess(_spec(arm, model, server, "stock")) as engine:
                turns = recompute(engine, conversations_of(options), options.max_tokens, salt="reference")
                result.report = check_external(engine, turns, salt=_SALT)
        except (EngineDiedError, EngineCallError, EngineStuckError, ValueError) as error:
            result.failure = str(error)
    result.seconds = time.monotonic() - started
    return result


def _show(console: Console, title: str, arms: Sequence[ArmResult]) -> None:
    table = Table(title=title)
    for column in ("spec", "engine"):
        table.add_column(column)
    for column in ("requests", "prompt tokens", "external hits", "hit tokens", "divergent"):
        table.add_column(column, justify="right")
    table.add_column("first divergence")
    table.add_column("s", justify="right")
    for arm in arms:
        for engine, report in (("first", arm.report), ("second", arm.second)):
            if engine == "second" and not report.requests:
                continue
            table.add_row(
                arm.spec,
                engine,
                str(report.requests),
                str(report.prompt_tokens),
                str(report.external_hits),
                str(report.hit_tokens),
                str(report.divergent),
                _first_divergence(report),
                f"{arm.seconds:.0f}" if engine == "first" else "",
            )
    console.print(table)
    for arm in arms:
        if arm.failure:
            console.print(f"{arm.spec}: could not be run to its end: {_reason(arm.failure)}", markup=False)
        if arm.leaked:
            console.print(f"{arm.spec}: left over: {arm.leaked}", markup=False)


def _first_divergence(report: Report) -> str:
    if not report.divergences:
        return "-"
    first = report.divergences[0]
    what = "token" if first.token_differs else "log-probability"
    return f"{what} at {first.position} (gap {first.logprob_gap:.3g})"


def _reason(failure: str) -> str:
    """The line of a traceback that says what went wrong."""
    errors = [line for line in failure.splitlines() if "Error" in line]
    return errors[-1].strip() if errors else failure[:500]
