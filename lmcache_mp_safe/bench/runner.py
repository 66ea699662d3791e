"""Runs cases, says pass or fail, and writes what came out as JSON and Markdown.

A case yields its rows one by one, and each row is printed and saved as it comes: what a time limit cuts off keeps what
was measured by then. Bytes are verified after the clock has stopped; a case that finds wrong ones raises
`WrongBytesError`, and its figures are worth nothing. A threshold that is missed is a figure like any other, unless
`--strict` is given.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable

Value = float | int | str | None


class WrongBytesError(Exception):
    """What was copied is not what should have been."""


@dataclass(frozen=True)
class Check:
    """A figure and the limit that it must keep."""

    what: str
    value: float
    relation: Literal[">=", "<="]
    limit: float

    @property
    def passed(self) -> bool:
        return self.value >= self.limit if self.relation == ">=" else self.value <= self.limit

    def __str__(self) -> str:
        return f"{'pass' if self.passed else 'FAIL'}: {self.what} {self.value:.3g} {self.relation} {self.limit:g}"


@dataclass(frozen=True)
class Row:
    """One line of a result. `values` by column; a column's name says its unit."""

    name: str
    values: dict[str, Value]
    checks: tuple[Check, ...] = ()

    def __str__(self) -> str:
        cells = [f"{column} {shown(value)}" for column, value in self.values.items()]
        return "   ".join([f"{self.name:<44}", *cells, *map(str, self.checks)])


class Case(Protocol):
    """One suite of measurements.

    Attributes:
        key: names it on the command line and in the results.
        description: what is measured and against what, in a sentence or two.
    """

    key: str
    description: str

    def can_run(self) -> str | None:
        """None, or why it cannot run here."""

    def run(self, quick: bool) -> Iterable[Row]:
        """Measure. `quick`: fewer repeats and smaller sizes, to see whether it works.

        Raises:
            WrongBytesError: what was copied is wrong.
        """


@runtime_checkable
class Plotted(Protocol):
    """A case that draws its result, too."""

    def plot(self, result: Result, path: Path) -> None:
        """Write a picture (SVG) of the result."""


Outcome = Literal["done", "skipped", "failed", "cut short"]


@dataclass
class Result:
    """What became of one case; `reason` of one that did not end well. One that is stopped stays "cut short"."""

    key: str
    description: str
    outcome: Outcome = "done"
    reason: str = ""
    seconds: float = 0.0
    header: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)

    @property
    def missed(self) -> list[str]:
        return [f"{row.name}: {check}" for row in self.rows for check in row.checks if not check.passed]


def run_case(case: Case, out: Path | None, quick: bool, header: dict[str, str]) -> Result:
    """Run one case. Never raises for what goes wrong inside of it."""
    result = Result(case.key, case.description, header=header)
    say(f"--- {case.key}: {case.description}")
    begin = time.monotonic()
    if reason := case.can_run():
        result.outcome, result.reason = "skipped", reason
        say(f"--- {case.key} cannot run: {reason}")
        return result  # nothing is written: results of a machine that can run it stay
    try:
        result.outcome = "cut short"
        for row in case.run(quick):
            result.rows.append(row)
            say(str(row))
            result.seconds = time.monotonic() - begin
            save(result, out)
        result.outcome = "done"
    except Exception as error:
        traceback.print_exc()
        result.outcome, result.reason = "failed", f"{type(error).__name__}: {error}"
    result.seconds = time.monotonic() - begin
    save(result, out)
    if out is not None and result.rows and isinstance(case, Plotted):
        case.plot(result, out / f"{case.key}.svg")
    verdict = f"{result.outcome}{': ' + result.reason if result.reason else ''}"
    say(f"--- {case.key} {verdict} ({result.seconds:.1f} s, {len(result.missed)} thresholds missed)")
    return result


def run_cases(
    cases: Sequence[Case], out: Path | None, quick: bool = False, strict: bool = False, command: str = ""
) -> int:
    """Run cases one after the other. Returns the exit status: 1 if one failed."""
    return exit_status(results_of(cases, out, quick, command), strict)


def results_of(cases: Sequence[Case], out: Path | None, quick: bool, command: str = "") -> list[Result]:
    """Run cases one after the other, and say in the end what became of each."""
    header = machine_header() | {"command": command or "python -m benchmarks", "quick": "yes" if quick else "no"}
    results = [run_case(case, out, quick, header) for case in cases]
    say("")
    for result in results:
        say(f"{result.key:<16} {result.outcome}{f' ({result.reason})' if result.reason else ''}")
        for line in result.missed:
            say(f"{'':<16} {line}")
    return results


def exit_status(results: Sequence[Result], strict: bool) -> int:
    """1 if a case failed, or with `strict` missed a threshold; else 0."""
    return 1 if any(result.outcome == "failed" or (strict and result.missed) for result in results) else 0


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


# --- results ----------------------------------------------------------------------------------------------------------


def save(result: Result, out: Path | None) -> None:
    """`<key>.json` and `<key>.md`."""
    if out is None:
        return
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{result.key}.json").write_text(json.dumps(asdict(result), indent=1) + "\n")
    (out / f"{result.key}.md").write_text(markdown(result))


def markdown(result: Result) -> str:
    lines = [f"# {result.key}", "", result.description, ""]
    lines += [f"* {name}: {value}" for name, value in result.header.items()]
    lines += [
        f"* outcome: {result.outcome}{' - ' + result.reason if result.reason else ''}, {result.seconds:.0f} s",
        "",
    ]
    columns = list(dict.fromkeys(column for row in result.rows for column in row.values))
    checked = any(row.checks for row in result.rows)
    titles = ["", *columns, *(["threshold"] if checked else [])]
    if result.rows:
        lines += [_line(titles), _line(["---"] * len(titles))]
    for row in result.rows:
        cells = [row.name, *(shown(row.values.get(column)) for column in columns)]
        lines.append(_line([*cells, *(["; ".join(map(str, row.checks))] if checked else [])]))
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def shown(value: Value) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# --- where and with what ----------------------------------------------------------------------------------------------


def machine_header() -> dict[str, str]:
    header = {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "GPU": _output("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader") or "none",
        "CPU": f"{_cpu()}, {len(os.sched_getaffinity(0))} cores",
        "load": f"{os.getloadavg()[0]:.1f}, as it began",
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
    header |= {name: _version(name) for name in ("torch", "vllm", "lmcache", "lmcache-mp-safe", "cupy", "numpy")}
    header |= {"torch's CUDA": _torch_cuda(), "commit": _commit()}
    return header


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _version(module: str) -> str:
    """Of whichever distribution holds this module: there are several of vLLM and cupy."""
    for distribution in _distributions().get(module.replace("-", "_"), []):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution)
    return "not installed"


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


def _torch_cuda() -> str:
    import torch

    return torch.version.cuda or "none"


def _commit() -> str:
    git = ("git", "-C", str(Path(__file__).parent))
    if not _output(*git, "ls-files", "--error-unmatch", Path(__file__).name):
        return "unknown"  # installed, perhaps inside of somebody else's repository
    commit = _output(*git, "rev-parse", "--short", "HEAD")
    changed = _output(*git, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}{' and local changes' if changed else ''}"


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
