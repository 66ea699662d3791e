"""Headless Chromium, driven by chromedriver in the WebDriver protocol: for tests of the pages that this package writes.

    with Browser() as browser:
        browser.open(path)
        assert browser.complaints() == []
        assert browser.run("return document.querySelectorAll('svg').length") == 3

On Debian: apt-get install chromium chromium-driver.
"""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from lmcache_mp_safe.testing.server import free_ports

_BROWSERS = ("chromium", "google-chrome", "chrome")
_DRIVER = "chromedriver"
_TIMEOUT_S = 30.0
_ASK_EVERY_S = 0.1
# Nothing but the page: no account, no update, no look at the network.
_FLAGS = (
    "--headless=new",
    "--no-sandbox",  # tests may run as root, and the page is our own
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--no-first-run",
)


def missing() -> str:
    """Why there is no browser here; empty if there is one."""
    lacking = [name for name, there in (("chromium", _browser()), (_DRIVER, shutil.which(_DRIVER))) if there is None]
    return f"not installed: {', '.join(lacking)} (on Debian: chromium chromium-driver)" if lacking else ""


def _browser() -> str | None:
    return next((path for name in _BROWSERS if (path := shutil.which(name))), None)


class Browser:
    """One window. It sees files and nothing of the network."""

    def __init__(self, width: int = 1000, height: int = 1400) -> None:
        (self._port,) = free_ports(1)
        self._size = f"--window-size={width},{height}"
        self._home = tempfile.TemporaryDirectory(prefix="browser_")
        self._driver: subprocess.Popen[bytes] | None = None
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=_TIMEOUT_S, trust_env=False)
        self._session = ""

    def __enter__(self) -> Self:
        self._driver = subprocess.Popen(
            [_DRIVER, f"--port={self._port}"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": self._home.name},
        )
        try:
            self._wait()
            options = {"args": [*_FLAGS, self._size, f"--user-data-dir={self._home.name}/data"], "binary": _browser()}
            wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            self._session = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._ask("DELETE", f"/session/{self._session}")
        finally:
            self._end()

    def open(self, path: Path) -> None:
        """Load a file, and return when it is shown."""
        self._command("POST", "/url", {"url": path.resolve().as_uri()})

    def run(self, script: str) -> Any:
        """What a JavaScript function body returns."""
        return self._command("POST", "/execute/sync", {"script": script, "args": []})

    def complaints(self) -> list[str]:
        """What the console said since the last time: errors of scripts and things that could not be loaded."""
        return [str(entry["message"]) for entry in self._command("POST", "/se/log", {"type": "browser"})]

    def screenshot(self, path: Path) -> None:
        """Write what the window shows as PNG."""
        path.write_bytes(base64.b64decode(self._command("GET", "/screenshot")))

    def _command(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._ask(method, f"/session/{self._session}{path}", body)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        reply = self._http.request(method, path, json=body)
        value = reply.json()["value"]
        if reply.status_code != httpx.codes.OK:
            raise RuntimeError(f"chromedriver: {method} {path}: {value}")
        return value

    def _wait(self) -> None:
        end = time.monotonic() + _TIMEOUT_S
        while time.monotonic() < end:
            try:
                self._ask("GET", "/status")
                return
            except httpx.TransportError:
                time.sleep(_ASK_EVERY_S)
        raise RuntimeError(f"chromedriver does not answer within {_TIMEOUT_S:g} s")

    def _end(self) -> None:
        self._http.close()
        if self._driver is not None:
            self._driver.terminate()
            self._driver.wait(_TIMEOUT_S)
        self._home.cleanup()
