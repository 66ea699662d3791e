"""`python -m benchmarks.probe.matrix [--jobs K] [--out DIR] [CELL...]`: many probes, several at once on one GPU.

A cell is one engine process, which goes through several phases: starting it takes longer than they do. Results are a
JSON and a log a cell, and `matrix.md` over all JSONs in the folder, so that a matrix can be run in parts.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks.probe.tables import markdown
from lmcache_mp_safe.bench.runner import machine_header, say

_SPECS = ("mtp", "none", "ngram")
_TAIL_LINES = 12
_RESULTS = Path(__file__).parents[1] / "results" / "probe"


@dataclass(frozen=True)
class Cell:
    """One probe; `arguments` of `python -m benchmarks.probe`."""

    name: str
    arguments: tuple[str, ...]


def _common() -> list[str]:
    return shlex.split("--batch-invariant --kv-gb 1 --l1-gb 4 --sessions 8 --turns 3 --max-tokens 16")


def _cells() -> Iterator[Cell]:
    """The longest first."""
    for connector in ("safe", "stock"):
        for spec in _SPECS:
            for batched, blocks, phases in (
                ("1.25", "46", "--phases ref,apc,ext,race,control,audit,multi --rounds 2"),
                ("4.2", "64", "--phases ref,apc,ext,control,audit,multi"),
            ):
                what = f"--connector {connector} --spec {spec} --batched-blocks {batched} --gpu-blocks {blocks}"
                arguments = (*shlex.split(f"{what} {phases} --race-sessions 5"), *_common())
                yield Cell(f"{connector}-{spec}-{batched}", arguments)
    for connector, spec in (("safe", "mtp"), ("safe", "none"), ("stock", "mtp")):
        what = f"--connector {connector} --spec {spec} --save-decode-cache --phases audit,decode --gpu-blocks 160"
        yield Cell(f"{connector}-{spec}-decode", (*shlex.split(what), *_common()))
    what = "--connector safe --spec none --graphs --phases ref,apc,ext,audit,multi --gpu-blocks 64"
    yield Cell("safe-none-graphs", (*shlex.split(what), *_common()))


def main() -> int:
    arguments = _parse()
    chosen = [cell for cell in _cells() if _is_chosen(cell.name, arguments.cells)]
    chosen = chosen[arguments.part - 1 :: arguments.parts]
    if arguments.list:
        for cell in chosen:
            print(cell.name, shlex.join([*cell.arguments, *arguments.extra]))
        return 0
    signal.signal(signal.SIGTERM, _interrupt)
    arguments.out.mkdir(parents=True, exist_ok=True)
    runs = Runs(arguments.out, tuple(arguments.extra), arguments.limit, time.monotonic() + arguments.total)
    try:
        good = runs.run_all(chosen, arguments.jobs)
    finally:
        command = f"python -m benchmarks.probe.matrix {shlex.join(sys.argv[1:])}"
        table = markdown(arguments.out, machine_header() | {"command": command})
        (arguments.out / "matrix.md").write_text(table)
    print(table)
    say(f"{sum(good)} of {len(chosen)} cells are good")
    return 0 if all(good) else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.probe.matrix", description="Many probes and a table.")
    parser.add_argument("cells", nargs="*", help="names, * and ? allowed; all if left out")
    parser.add_argument("--list", action="store_true", help="say which cells there are")
    parser.add_argument("--jobs", type=int, default=6, help="probes at once (%(default)s)")
    parser.add_argument("--parts", type=int, default=1, help="split the cells into so many parts")
    parser.add_argument("--part", type=int, default=1, help="which of them to run, from 1")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for a cell (%(default)s)")
    parser.add_argument("--total", type=float, default=570.0, help="seconds for everything (%(default)s)")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="where results go (%(default)s)")
    parser.add_argument("--extra", type=shlex.split, default=[], help="further arguments for every probe, in one word")
    return parser.parse_args()


def _is_chosen(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


class Runs:
    """Runs cells as child processes, each in a process group of its own, which ends with it."""

    def __init__(self, out: Path, extra: tuple[str, ...], limit_s: float, end: float) -> None:
        self._out = out
        self._extra = extra
        self._limit_s = limit_s
        self._end = end
        self._lock = threading.Lock()
        self._children: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def run_all(self, cells: Sequence[Cell], jobs: int) -> list[bool]:
        with ThreadPoolExecutor(jobs) as pool:
            try:
                return list(pool.map(self.run, cells))
            except BaseException:
                self.stop()  # before the pool waits for its threads
                raise

    def run(self, cell: Cell) -> bool:
        """Whether it ended well."""
        begin = time.monotonic()
        limit = min(self._limit_s, self._end - begin)
        result, log = self._out / f"{cell.name}.json", self._out / f"{cell.name}.log"
        result.unlink(missing_ok=True)
        if limit < 60 or self._stopped:
            say(f"{cell.name}: left out, the time is up")
            return False
        shm_name = f"probe_{os.getpid()}_{cell.name}"
        command = [sys.executable, "-m", "benchmarks.probe", *cell.arguments, "--out", str(result)]
        command += ["--log", str(self._out / f"{cell.name}.server.log"), "--shm-name", shm_name, *self._extra]
        status = self._wait(command, log, limit)
        for segment in Path("/dev/shm").glob(f"*{shm_name}"):
            segment.unlink(missing_ok=True)
        verdict = "good" if status == 0 else "out of time" if status is None else f"failed ({status})"
        say(f"{cell.name}: {verdict}, {time.monotonic() - begin:.0f} s")
        if status != 0:
            lines = log.read_text(errors="replace").splitlines() or [""]
            problems = json.loads(result.read_text())["problems"] if result.exists() else lines[-_TAIL_LINES:]
            say("\n".join(f"    {line[:400]}" for line in problems))
        return status == 0

    def _wait(self, command: Sequence[str], log: Path, limit: float) -> int | None:
        with self._lock, log.open("wb") as output:
            if self._stopped:
                return None
            child = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
            )
            self._children.add(child)
        try:
            return child.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end_group(child)
            with self._lock:
                self._children.discard(child)

    def stop(self) -> None:
        """End everything that runs; nothing more is started."""
        with self._lock:
            self._stopped = True
            children = list(self._children)
        for child in children:
            _end_group(child)


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """A server that a probe left behind ends, too."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
