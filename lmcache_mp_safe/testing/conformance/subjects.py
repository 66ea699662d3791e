"""The two servers that behaviours are asked of."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable
from typing import Any

from lmcache_mp_safe.testing.conformance.behaviours import Flavour
from lmcache_mp_safe.testing.fake_server import FakeClient, FakeServer, SharedMemory, at_once
from lmcache_mp_safe.testing.server import SHARED_MEMORY_FLAGS, LMCacheServer
from lmcache_mp_safe.wire.connecting import OwnClient

POOL_BYTES = 64 << 20
LOCK_S = 3.0
LOOKUP_S = 0.5
REAP_S = 30.0  # the least that the server accepts
SESSION_S = 1.0
SESSIONS_CLEANED_S = 60.0  # how often the server looks for sessions that are too old

_WRITTEN_BELOW_S = 2.0  # what the slow tier needs to take in an object


class FakeSubject:
    """`FakeServer` with a clock that stands still unless a behaviour waits.

    Args:
        make: makes the server in place of `FakeServer`, with the same arguments; for servers that lie.
    """

    patience_s = 0.0
    silence_s = 0.0

    def __init__(self, flavour: Flavour, make: Callable[..., FakeServer] = FakeServer) -> None:
        self._now = 0.0
        self._flavour = flavour
        self._memory = SharedMemory(POOL_BYTES)
        settings: dict[str, float] = {}
        if flavour is Flavour.SHORT:
            settings = {"write_ttl_s": LOCK_S, "read_ttl_s": LOCK_S}
        elif flavour is Flavour.PATIENT:
            settings = {"reap_s": REAP_S, "session_ttl_s": SESSION_S}
        self.server = make(lambda: self._now, self._memory, shm_name=self._memory.name, **settings)

    def client(self) -> FakeClient:
        return FakeClient(at_once(self.server))

    def wait(self, seconds: float) -> None:
        """In steps, as the server's own threads would see it pass."""
        end = self._now + seconds
        while self._now < end:
            self._now = min(end, self._now + 0.1)
            self.server.tick()

    def restart(self) -> None:
        self.server.restart()

    def open_lookups(self) -> int:
        return len(self.server.lookups)

    def forget_memory(self) -> None:
        """The fake has no second tier: its lookups take their time whatever they find."""
        self.server.lookup_s = LOOKUP_S

    def close(self) -> None:
        self._memory.close()


class RealSubject:
    """A stock server. `launch` and `close` are the caller's to call."""

    patience_s = 20.0
    silence_s = 0.4

    def __init__(self, flavour: Flavour) -> None:
        self._flavour = flavour
        self.server = LMCacheServer(
            l1_size_gb=POOL_BYTES / 2**30,
            flags=SHARED_MEMORY_FLAGS,
            extra=_flags(flavour),
            start_timeout_s=300.0,  # all flavours start at once
        )
        self._clients: list[OwnClient] = []

    def launch(self) -> None:
        """Start the process and go on; `ready` waits for it."""
        self.server.launch()

    def ready(self) -> None:
        self.server.wait()

    def client(self) -> OwnClient:
        client = OwnClient(self.server.url)
        self._clients.append(client)
        return client

    def close_clients(self) -> None:
        """After each behaviour: its calls that are never answered would stay in its client's tables."""
        while self._clients:
            self._clients.pop().close()

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def restart(self) -> None:
        self.server.restart()

    def open_lookups(self) -> int:
        text = json.dumps(self._status())
        return int(text.split('"active_prefetch_jobs": ')[1].split(",")[0].rstrip("}"))

    def forget_memory(self) -> None:
        time.sleep(_WRITTEN_BELOW_S)
        client = self.client()
        client.clear(False).result(self.patience_s)

    def close(self) -> None:
        self.close_clients()
        self.server.stop()

    def _status(self) -> Any:
        with urllib.request.urlopen(f"{self.server.http_url}/status", timeout=10) as page:
            return json.load(page)


def _flags(flavour: Flavour) -> list[str]:
    if flavour is Flavour.SHORT:
        return ["--l1-write-ttl-seconds", f"{LOCK_S:.0f}", "--l1-read-ttl-seconds", f"{LOCK_S:.0f}"]
    if flavour is Flavour.PATIENT:
        return ["--worker-reap-timeout-seconds", str(REAP_S), "--session-ttl-seconds", str(SESSION_S)]
    if flavour is Flavour.SLOW:
        # A second tier of LMCache's own for tests: one small object takes about a second.
        return ["--l2-adapter", json.dumps({"type": "mock", "max_size_gb": 0.1, "mock_bandwidth_gb": 8e-6})]
    return []
