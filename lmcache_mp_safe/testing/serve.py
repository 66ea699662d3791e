"""A real `vllm serve` on CPU as a child process, with a tiny model and its tokenizer: for tests that speak HTTP.

    spec = EngineSpec(model_dir, kind="hybrid", connector="safe", connector_extra={...}, max_model_len=8192)
    with ServeProcess(spec) as server:
        httpx.post(f"{server.url}/v1/chat/completions", json={...})

Everything goes by the child's own process group: nothing here can touch a server that somebody else started.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from lmcache_mp_safe.testing.cpu_guards import GUARDS_VARIABLE, guards_for
from lmcache_mp_safe.testing.engine import ENVIRONMENT, EngineSpec
from lmcache_mp_safe.testing.models import write_model
from lmcache_mp_safe.testing.server import free_ports
from lmcache_mp_safe.testing.tokenizer import write_tokenizer

START_TIMEOUT_S = 180.0  # half a minute on an idle machine
MODEL_NAME = "tiny"

_HOST = "127.0.0.1"
_COMMAND = (sys.executable, "-m", "lmcache_mp_safe.testing.vllm_cli", "serve")
_ASK_TIMEOUT_S = 2.0
_ASK_EVERY_S = 0.25
_LOG_TAIL_LINES = 40
# Arguments of `vllm.LLM` that a server has no flag for.
_NOT_FLAGS = frozenset({"model", "skip_tokenizer_init", "use_tqdm_on_load"})


class ServeError(Exception):
    """The server ended, or did not answer in time; the message ends with the tail of its log."""


class ServeProcess:
    """One `vllm serve` on a free loopback port. The model it serves is called `MODEL_NAME`.

    Args:
        spec: what the engine is; `in_process` has no meaning here. The model is written first if there is none.
        flags: further arguments of `vllm serve`.
        dev_mode: also serve vLLM's development routes, `/reset_prefix_cache` among them.
        environment: added to this process's environment; None removes a variable.
        log: file for the server's output; a temporary one if left out.
    """

    def __init__(
        self,
        spec: EngineSpec,
        *,
        flags: Sequence[str] = (),
        dev_mode: bool = False,
        environment: Mapping[str, str | None] | None = None,
        log: Path | None = None,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self.spec = spec
        (self.port,) = free_ports(1)
        self._flags = (*flags, "--host", _HOST, "--port", str(self.port), "--served-model-name", MODEL_NAME)
        self._environment = _environment(spec, dev_mode, environment or {})
        self._start_timeout_s = start_timeout_s
        self.log = log if log is not None else Path(tempfile.mkdtemp(prefix="vllm_serve_")) / "serve.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.port}"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the server and wait until it is healthy.

        Raises:
            ServeError: it ended or was not healthy in time.
        """
        self.launch()
        self.wait()

    def launch(self) -> None:
        """Start the process; `wait` has to follow. Two servers come up side by side."""
        if not (Path(self.spec.model_dir) / "config.json").exists():
            write_model(self.spec.kind, self.spec.model_dir, self.spec.model_seed)
        write_tokenizer(self.spec.model_dir)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*_COMMAND, self.spec.model_dir, *serve_flags(self.spec), *self._flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self._environment,
                start_new_session=True,  # so that a signal reaches the engine core too
            )

    def wait(self) -> None:
        """Wait until a launched server is healthy. Raises as `start`."""
        end = time.monotonic() + self._start_timeout_s
        try:
            while not answers(f"{self.url}/health"):
                if not self.running:
                    code = self._process.returncode if self._process else None
                    raise ServeError(f"vllm serve ended with code {code}; {self.log}:\n{self.log_tail()}")
                if time.monotonic() > end:
                    waited = f"was not healthy within {self._start_timeout_s:.0f} s"
                    raise ServeError(f"vllm serve {waited}; {self.log}:\n{self.log_tail()}")
                time.sleep(_ASK_EVERY_S)
        except BaseException:
            self.kill()
            raise

    def log_tail(self, lines: int = _LOG_TAIL_LINES) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def stop(self, timeout_s: float = 20.0) -> None:
        """SIGTERM to the front end, which ends the engine; SIGKILL to what is left of the group."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        self.kill()

    def kill(self) -> None:
        """SIGKILL, the engine core included."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def serve_flags(spec: EngineSpec) -> list[str]:
    """The arguments of `vllm serve` that make the engine of `spec`; the model is not among them."""
    flags: list[str] = []
    for name, value in spec.arguments().items():
        if name not in _NOT_FLAGS and value is not None:
            flags += _flag(name.replace("_", "-"), value)
    return flags


def _flag(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, Mapping):
        return [f"--{name}", json.dumps(value)]
    return [f"--{name}", str(value)]


def answers(url: str, timeout_s: float = _ASK_TIMEOUT_S) -> bool:
    """Whether a GET of this address succeeds within this time."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:
            return int(response.status) == 200
    except (urllib.error.URLError, OSError):
        return False


def _environment(spec: EngineSpec, dev_mode: bool, changes: Mapping[str, str | None]) -> dict[str, str]:
    wanted: dict[str, str | None] = {
        **ENVIRONMENT,
        **os.environ,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_SERVER_DEV_MODE": "1" if dev_mode else "0",
        GUARDS_VARIABLE: guards_for(speculation=spec.speculation != "none"),
        **changes,
    }
    # This package first, wherever it was imported from.
    paths = [str(Path(__file__).parents[2]), wanted.get("PYTHONPATH") or ""]
    wanted["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return {name: value for name, value in wanted.items() if value is not None}
