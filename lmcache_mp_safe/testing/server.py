"""A stock `lmcache server` as a child process, for tests, benchmarks and the demo.

Everything goes by the child's own process id: nothing here can touch a server that somebody else started.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from lmcache_mp_safe.errors import Scope, ServerError

_COMMAND = [sys.executable, "-c", "import sys; from lmcache.cli.main import main; sys.exit(main())", "server"]
_HOST = "127.0.0.1"
_PING_TIMEOUT_S = 1.0
_HTTP_TIMEOUT_S = 10.0
_FIRST_PORT = 10_000
_LOG_TAIL_LINES = 25
# The flags without which the server does not lend its memory.
SHARED_MEMORY_FLAGS = ("--no-l1-use-lazy", "--supported-transfer-mode", "auto")
# The server puts this before every `--shm-name`.
_SEGMENT_PREFIX = "lmcache_l1_pool_"


class LMCacheServer:
    """One server on free loopback ports.

    Args:
        l1_size_gb: size of the pool in GiB; it lies in /dev/shm and is sparse.
        shm_name: name of the pool; a random one if left out, none at all if empty (the server then lends no memory).
        flags: what makes the server lend its memory; pass () for a server with LMCache's defaults.
        extra: further arguments for `lmcache server`.
        start_timeout_s: how long the start may take until the server answers a ping.
        log: file for the server's output; a temporary one if left out.
        environment: added to this process's environment; an empty CUDA_VISIBLE_DEVICES hides the GPUs.
    """

    def __init__(
        self,
        *,
        l1_size_gb: float = 0.25,
        shm_name: str | None = None,
        flags: Sequence[str] = SHARED_MEMORY_FLAGS,
        extra: Sequence[str] = (),
        start_timeout_s: float = 180.0,
        log: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.shm_name = f"safe_{secrets.token_hex(6)}" if shm_name is None else shm_name
        self.port, self._http_port, prometheus_port = free_ports(3)
        self.http_url = f"http://{_HOST}:{self._http_port}"
        self._arguments = [
            *_COMMAND,
            *("--host", _HOST, "--port", str(self.port)),
            *("--http-port", str(self._http_port), "--prometheus-port", str(prometheus_port)),
            *("--l1-size-gb", str(l1_size_gb), "--eviction-policy", "LRU"),
            *flags,
            *extra,
        ]
        self._start_timeout_s = start_timeout_s
        self._environment = {"LMCACHE_TRACK_USAGE": "false", **(environment or {})}
        self.log = log if log is not None else Path(tempfile.mkdtemp(prefix="lmcache_server_")) / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._paused = False
        self._old_segments: list[Path] = []

    @property
    def url(self) -> str:
        return f"tcp://{_HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the running server.

        Raises:
            ServerError: it does not run.
        """
        if self._process is None:
            raise ServerError("the LMCache server is not running", scope=Scope.SERVER)
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def segment_path(self) -> Path:
        return Path("/dev/shm") / f"{_SEGMENT_PREFIX}{self.shm_name}"

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            ServerError: it ended or did not answer in time; the message ends with the tail of its log.
        """
        if not self.running:
            self.launch()
            self.wait()

    def launch(self) -> None:
        """Start the process; `wait` has to follow. It comes up while something else is done."""
        if self.running:
            return
        self.log.parent.mkdir(parents=True, exist_ok=True)
        name = ("--shm-name", self.shm_name) if self.shm_name else ()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._arguments, *name],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self._environment},
            )

    def wait(self) -> None:
        """Wait until a launched server answers. Raises as `start`."""
        try:
            self._wait_until_it_answers()
        except BaseException:
            self.kill()
            raise

    def _wait_until_it_answers(self) -> None:
        end = time.monotonic() + self._start_timeout_s
        while not answers_ping(self.url, _PING_TIMEOUT_S):
            if not self.running:
                code = self._process.returncode if self._process else None
                raise ServerError(f"lmcache server ended with code {code}:\n{self.log_tail()}", scope=Scope.SERVER)
            if time.monotonic() > end:
                waited = f"did not answer within {self._start_timeout_s:.0f} s"
                raise ServerError(f"lmcache server {waited}:\n{self.log_tail()}", scope=Scope.SERVER)

    def log_tail(self, lines: int = _LOG_TAIL_LINES) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])

    def pause(self) -> None:
        """SIGSTOP: the server keeps its memory and its connections and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)
        self._paused = True

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)
        self._paused = False

    def stop(self, timeout_s: float = 10.0) -> None:
        """SIGTERM, then SIGKILL for one that does not end in time."""
        if self._process is None:
            return
        if self._paused:
            self.resume()
        self._process.terminate()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None
        self._remove_segment()

    def kill(self) -> None:
        """SIGKILL. The pool's name may outlive the server for about a second, as after a crash."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._process = None
        self._paused = False

    def rename(self) -> None:
        """The next start gives the pool another name. The segment of the old one stays until somebody removes it."""
        self._old_segments.append(self.segment_path)
        self.shm_name = f"safe_{secrets.token_hex(6)}"

    def restart(self) -> None:
        """A new process with the same ports and the same pool name, after a clean end of the old one."""
        self.stop()
        self.start()

    def status(self) -> dict[str, Any]:
        """What the server's HTTP port says about itself: sessions, locks, the pool."""
        return self._http("GET", "/status")

    def clear(self) -> None:
        """Drop every object, the locked ones too, as an operator can: bytes under a held slot may change from here."""
        self._http("POST", "/cache/clear", {"tier": "l1", "force": True})

    def _http(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        connection = http.client.HTTPConnection(_HOST, self._http_port, timeout=_HTTP_TIMEOUT_S)
        with contextlib.closing(connection):
            content = None if body is None else json.dumps(body)
            connection.request(method, path, content, {"Content-Type": "application/json"} if content else {})
            answer = connection.getresponse()
            text = answer.read()
        if answer.status != http.HTTPStatus.OK:
            raise ServerError(f"{method} {path}: {answer.status} {text[:200]!r}", scope=Scope.SERVER)
        return cast(dict[str, Any], json.loads(text))

    def _remove_segment(self) -> None:
        segments = [*self._old_segments, *([self.segment_path] if self.shm_name else [])]
        self._old_segments.clear()
        for segment in segments:
            segment.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        self._remove_segment()


def answers_ping(url: str, timeout_s: float) -> bool:
    """Whether an LMCache server answers there within this time."""
    from lmcache.v1.multiprocess.transport.factory import RequestClientFactory
    from zmq.sugar.context import Context

    context = Context()
    context.linger = 0  # an unanswered ping must not wait in the socket for ever
    client = RequestClientFactory.create(url, context=context)
    try:
        return bool(client.ping(None).wait(timeout_s))
    finally:
        client.close()
        context.term()


def free_ports(count: int) -> list[int]:
    """Free ports of the loopback that no outgoing connection takes meanwhile: a server that is killed wants its own
    back."""
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(ports) < count:
            port = secrets.choice(_server_ports())
            one = stack.enter_context(socket.socket())
            with contextlib.suppress(OSError):  # in use
                one.bind((_HOST, port))
                ports.append(port)
    return ports


def _server_ports() -> range:
    """Ports below those that outgoing connections take, where the system leaves any."""
    first_outgoing = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    return range(_FIRST_PORT, first_outgoing if first_outgoing > _FIRST_PORT else 1 << 16)
