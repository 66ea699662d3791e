"""`python -m benchmarks.probe`: one engine, its server, its phases. The last line printed is JSON."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from benchmarks.probe.options import Options, parse

SUMMARY = "SUMMARY "


def main() -> int:
    options = parse()
    options.set_environment()
    from benchmarks.probe.report import Result  # not earlier: torch reads the environment

    signal.signal(signal.SIGTERM, _interrupt)
    result = Result(arguments=_arguments(options))
    try:
        run(options, result)
        result.finished = True
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        traceback.print_exc()
        result.problems.append(f"{type(error).__name__}: {error}")
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result.as_json(), indent=1) + "\n")
    print(f"{SUMMARY}{json.dumps(result.as_json())}", flush=True)
    return 0 if result.ok else 1


def run(options: Options, result: Any) -> None:
    from benchmarks.probe.engine import facts, make_engine, prepare_import
    from benchmarks.probe.report import say
    from benchmarks.probe.server import make_server

    server = make_server(options)
    with _launched(server):
        prepare_import(options)
        import vllm  # while the server comes up

        say(f"vLLM {vllm.__version__} imported")
        if server is not None:
            server.wait()
            say("server up")
        from benchmarks.probe.phases import Probe
        from benchmarks.probe.watch import install

        watch = install(options)
        engine = make_engine(options, server)
        result.engine = facts(engine)
        say("engine up", result.engine)
        probe = Probe(options, engine, server, watch)
        try:
            probe.run(result)
            result.left = probe.left()
            say("left", result.left)
        finally:
            if options.connector != "stock":
                result.look_for_problems()


@contextlib.contextmanager
def _launched(server: Any) -> Iterator[None]:
    if server is None:
        yield
        return
    server.launch()
    try:
        yield
    finally:
        server.stop()


def _arguments(options: Options) -> dict[str, Any]:
    return {name: value for name, value in json.loads(json.dumps(asdict(options), default=str)).items() if value}


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # client threads of LMCache outlive their use
