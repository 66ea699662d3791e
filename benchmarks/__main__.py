"""`python -m benchmarks KEY... [--out DIR] [--quick] [--strict]`, `python -m benchmarks --list`."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from benchmarks import copies, cpu, engine, hooks, interference, server
from lmcache_mp_safe.bench.cases import CASES as WITHOUT_GPU
from lmcache_mp_safe.bench.runner import Case, run_cases

CASES: tuple[Case, ...] = (
    *WITHOUT_GPU,
    cpu.SpanTimes(),
    copies.CopyRates(),
    copies.RunLengths(),
    interference.Interference(),
    server.Server(),
    hooks.Hooks(),
    hooks.FirstUse(),
    engine.TimeToFirstToken(),
    engine.DecodeRate(),
)
RESULTS = Path(__file__).parent / "results"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Measurements of lmcache_mp_safe.")
    parser.add_argument("keys", nargs="*", metavar="KEY", help="which; `all` for every one that can run here")
    parser.add_argument("--list", action="store_true", help="say which there are and whether they can run here")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where results go (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer repeats: does it work, not how fast is it")
    parser.add_argument("--strict", action="store_true", help="a missed threshold is a failure")
    arguments = parser.parse_args()
    known = {case.key: case for case in CASES}
    if arguments.list:
        for case in CASES:
            reason = case.can_run()
            print(f"{case.key:<16} {case.description}{f' [cannot run here: {reason}]' if reason else ''}")
        return 0
    keys = list(known) if arguments.keys == ["all"] else arguments.keys
    if unknown := [key for key in keys if key not in known] or ([] if keys else ["none"]):
        parser.error(f"no case {', '.join(unknown)}; there are {', '.join(known)}, and all")
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
    os.environ.setdefault("LMCACHE_DISABLE_BANNER", "1")
    command = f"python -m benchmarks {shlex.join(sys.argv[1:])}"
    cases = [known[key] for key in keys]
    try:
        return run_cases(cases, arguments.out, arguments.quick, arguments.strict, command)
    finally:
        engine.ENGINES.close()


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # LMCache's client threads outlive their use
