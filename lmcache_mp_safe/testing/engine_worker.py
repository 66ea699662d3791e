"""An engine in a process of its own: a clean vLLM, another interpreter, two at once, or one to be killed.

    with EngineProcess(spec, python=".venv-0.27.1/bin/python") as engine:
        answers = engine.generate([prompt], max_tokens=24)
        blocks = engine.run(count_blocks, "an argument")  # count_blocks(engine: Engine, what: str) runs over there
        engine.kill()

Requests and replies are pickles with a length in front, on two pipes that belong to the pair; what vLLM prints goes
to a log. Every call has a deadline after which the process is killed, so that a test cannot hang on an engine that
does.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, BinaryIO, TypeVar, cast

from lmcache_mp_safe.testing.engine import DRAIN_DEADLINE_S, Answer, Engine, EngineSpec, EngineStuckError

T = TypeVar("T")

START_DEADLINE_S = 180.0
CALL_DEADLINE_S = 300.0
_LOG_TAIL_LINES = 30
_LENGTH_BYTES = 8


class EngineDiedError(Exception):
    """The engine process ended, or was killed because it missed a deadline."""


class EngineCallError(Exception):
    """The call raised in the engine process; the message holds the traceback from there."""


class EngineProcess:
    """The API of `Engine`, over pipes.

    Args:
        python: interpreter; the one of this process if left out. The package must be importable there.
        environment: added to this process's environment; None removes a variable.
        log: file for the engine's output; a temporary one if left out.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        python: str | Path = sys.executable,
        environment: dict[str, str | None] | None = None,
        log: Path | None = None,
        start_deadline_s: float = START_DEADLINE_S,
    ) -> None:
        self.log = log if log is not None else _new_log()
        request_read, request_write = os.pipe()
        reply_read, reply_write = os.pipe()
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                [str(python), "-m", "lmcache_mp_safe.testing.engine_worker", str(request_read), str(reply_write)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(request_read, reply_write),
                env=_environment(environment or {}),
                start_new_session=True,  # so that kill reaches workers of its own too
            )
        os.close(request_read)
        os.close(reply_write)
        self._requests: BinaryIO = os.fdopen(request_write, "wb")
        self._replies: BinaryIO = os.fdopen(reply_read, "rb")
        self.spec = spec
        try:
            self._call("start", spec, deadline_s=start_deadline_s)
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        salts: Sequence[str | None] | None = None,
        request_ids: Sequence[str] | None = None,
        deadline_s: float = CALL_DEADLINE_S,
    ) -> list[Answer]:
        options = {"salts": salts, "request_ids": request_ids, "deadline_s": deadline_s}
        self._send("generate", (list(prompts), max_tokens), options)
        return self.finish(deadline_s + 5)

    def reset_prefix_cache(self, deadline_s: float = DRAIN_DEADLINE_S) -> None:
        self._call("reset_prefix_cache", deadline_s, deadline_s=deadline_s + 5)

    def drain(self, deadline_s: float = DRAIN_DEADLINE_S) -> None:
        self._call("drain", deadline_s, deadline_s=deadline_s + 5)

    def held_blocks(self) -> int:
        return cast(int, self._call("held_blocks"))

    def run(self, function: Callable[..., T], *arguments: Any, deadline_s: float = CALL_DEADLINE_S) -> T:
        """`function(engine, *arguments)` in the engine process.

        It must be a top-level function of a file, which is loaded over there under another name.
        """
        path = sys.modules[function.__module__].__file__
        return cast(T, self._call("run", path, function.__qualname__, *arguments, deadline_s=deadline_s))

    def start_generate(self, prompts: Sequence[Sequence[int]], max_tokens: int, **options: Any) -> None:
        """`generate` without waiting: to kill or stop the engine meanwhile, or to run two at once. Then `finish`."""
        self._send("generate", (list(prompts), max_tokens), options)

    def finish(self, deadline_s: float = CALL_DEADLINE_S) -> list[Answer]:
        return cast(list[Answer], self._receive("generate", deadline_s))

    def close(self, deadline_s: float = 30.0) -> None:
        """End the engine properly, or kill it if that takes too long."""
        if self._process.poll() is None:
            with contextlib.suppress(EngineDiedError, EngineCallError, OSError):
                self._call("close", deadline_s=deadline_s)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
        self.kill()

    def kill(self) -> None:
        """kill -9, the engine's own children included."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._requests, self._replies):
            with contextlib.suppress(OSError):
                pipe.close()

    # --- the pipe ------------------------------------------------------------------

    def _call(self, method: str, *arguments: Any, deadline_s: float = CALL_DEADLINE_S) -> Any:
        self._send(method, arguments, {})
        return self._receive(method, deadline_s)

    def _send(self, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        try:
            _write(self._requests, (method, arguments, options))
        except (OSError, ValueError) as error:
            raise EngineDiedError(self._obituary(f"before {method}")) from error

    def _receive(self, method: str, deadline_s: float) -> Any:
        end = time.monotonic() + deadline_s
        try:
            raised, value = pickle.loads(_read(self._replies, end))
        except TimeoutError as error:
            self.kill()
            raise EngineDiedError(self._obituary(f"killed: {method} took more than {deadline_s:g} s")) from error
        except (EOFError, OSError, ValueError) as error:
            self._process.wait()
            raise EngineDiedError(self._obituary(f"during {method}")) from error
        if raised:
            name, words = value
            kind = EngineStuckError if name == EngineStuckError.__name__ else EngineCallError
            raise kind(f"{words}\nlog: {self.log}")
        return value

    def _obituary(self, when: str) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return "\n".join(
            [f"engine process {self.pid} ended ({when}), status {self._process.poll()}; {self.log}:", *lines]
        )


def _new_log() -> Path:
    descriptor, name = tempfile.mkstemp(prefix="engine-", suffix=".log")
    os.close(descriptor)
    return Path(name)


def _environment(changes: dict[str, str | None]) -> dict[str, str]:
    environment = {name: value for name, value in {**os.environ, **changes}.items() if value is not None}
    # This package first, wherever it was imported from: a second interpreter need not have it installed.
    paths = [str(Path(__file__).parents[2]), environment.get("PYTHONPATH", "")]
    return environment | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)}


def _write(pipe: BinaryIO, value: Any) -> None:
    body = pickle.dumps(value)
    pipe.write(len(body).to_bytes(_LENGTH_BYTES, "big") + body)
    pipe.flush()


def _read(pipe: BinaryIO, end: float | None) -> bytes:
    """One message; TimeoutError past `end` on the monotonic clock, EOFError if the other side is gone."""
    return _read_exactly(pipe, int.from_bytes(_read_exactly(pipe, _LENGTH_BYTES, end), "big"), end)


def _read_exactly(pipe: BinaryIO, size: int, end: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        wait_s = None if end is None else max(0.0, end - time.monotonic())
        if not select.select([pipe], [], [], wait_s)[0]:
            raise TimeoutError
        part = os.read(pipe.fileno(), size - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)


# --- the child -------------------------------------------------------------------------


def _serve(requests: BinaryIO, replies: BinaryIO) -> None:
    engine: Engine | None = None
    method = ""
    while method != "close":
        try:
            message = _read(requests, None)
        except EOFError:  # the parent is gone
            return
        try:
            method, arguments, options = pickle.loads(message)
            if method == "start":
                engine, value = Engine(*arguments), None
            else:
                value = _perform(engine, method, arguments, options)
            _write(replies, (False, value))
        except Exception as error:
            _write(replies, (True, (type(error).__name__, traceback.format_exc())))


def _perform(engine: Engine | None, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    if engine is None:
        raise RuntimeError("the engine did not start")
    if method == "run":
        path, name, *rest = arguments
        return getattr(_load(path), name)(engine, *rest)
    return getattr(engine, method)(*arguments, **options)


@functools.cache
def _load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"engine_calls_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    request_number, reply_number = map(int, sys.argv[1:])
    with os.fdopen(request_number, "rb") as requests, os.fdopen(reply_number, "wb") as replies:
        _serve(requests, replies)
    os._exit(0)  # threads that a library left behind must not keep an ended engine alive
