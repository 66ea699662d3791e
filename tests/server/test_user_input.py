"""A real server takes whatever a user's salt or an operator's model path becomes, and keeps any two of them apart."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

import pytest

from lmcache_mp_safe.identity import namespace
from lmcache_mp_safe.testing.server import LMCacheServer
from lmcache_mp_safe.wire import Committed, LookupAnswered, Reserved, SessionId, Wire, WireConfig
from lmcache_mp_safe.wire.events import SessionEvent

pytestmark = [pytest.mark.server, pytest.mark.timeout(120)]

OBJECT = 8192
NASTY = [
    "",
    "plain",
    "@",
    "a/b\\c@d",
    "../../etc/passwd",
    "\x00",
    "\x01\x1b[0m\r\n\t",
    "x" * 128,
    "x" * 129,
    "x" * 10_000,
    "x" * 9_999 + "y",
    "模型🙂",
    "\ud800",
    "\udc00",
    " ",
    "digest-",
]


class Client:
    """One engine's wire, polled in real time."""

    def __init__(self, url: str, name: str) -> None:
        self.wire = Wire(WireConfig(url, name, OBJECT))
        self.wire.start(time.monotonic())
        self._answers: list[SessionEvent] = []
        end = time.monotonic() + 20
        while not self.wire.up:
            assert time.monotonic() < end, self.wire.why_down
            self.wire.poll(time.monotonic())
            time.sleep(0.002)

    def answer(self, session: SessionId) -> SessionEvent:
        end = time.monotonic() + 20
        while time.monotonic() < end:
            for event in self.wire.poll(time.monotonic()):
                if isinstance(event, SessionEvent) and event.session == session:
                    return event
            time.sleep(0.002)
        raise AssertionError("no answer")

    def store(self, digest: bytes, salt: str) -> None:
        session = self.wire.open([digest], salt)
        self.wire.reserve(session, 0, 1, time.monotonic())
        reserved = self.answer(session)
        assert isinstance(reserved, Reserved), reserved
        assert len(reserved.offsets) == 1
        self.wire.commit(session, reserved.call, time.monotonic())
        committed = self.answer(session)
        assert isinstance(committed, Committed), committed
        assert committed.accepted
        self.wire.close(session, time.monotonic())

    def has(self, digest: bytes, salt: str) -> bool:
        session = self.wire.open([digest], salt)
        self.wire.lookup(session, 1, time.monotonic())
        looked_up = self.answer(session)
        assert isinstance(looked_up, LookupAnswered), looked_up
        self.wire.close(session, time.monotonic())
        return looked_up.found == 1

    def will_have(self, digest: bytes, salt: str) -> bool:
        """A store shows in a lookup a moment after it was acknowledged."""
        return any(self.has(digest, salt) or time.sleep(0.05) for _ in range(40))  # type: ignore[func-returns-value]


@pytest.fixture(scope="module")
def server() -> Iterator[LMCacheServer]:
    with LMCacheServer(l1_size_gb=0.25) as running:
        yield running


def test_any_two_salts_are_kept_apart_by_the_server(server: LMCacheServer) -> None:
    """The digests of a request hold its salt as well; here they are equal, so the server alone tells."""
    client = Client(server.url, "salts")
    try:
        for stored in range(len(NASTY)):
            digest = secrets.token_bytes(32)
            client.store(digest, NASTY[stored])
            assert client.will_have(digest, NASTY[stored]), repr(NASTY[stored][:20])
            others = [salt for salt in NASTY if salt != NASTY[stored]]
            assert not [salt[:20] for salt in others if client.has(digest, salt)]
    finally:
        client.wire.shutdown(2.0)


def test_any_two_model_paths_are_kept_apart_by_the_server(server: LMCacheServer) -> None:
    digest = secrets.token_bytes(32)
    clients = {path: Client(server.url, namespace(path, [])) for path in NASTY[:10] + NASTY[11:14]}
    try:
        paths = list(clients)
        for stored, path in enumerate(paths):
            clients[path].store(digest, "")
            assert clients[path].will_have(digest, ""), repr(path[:20])
            assert not [later[:20] for later in paths[stored + 1 :] if clients[later].has(digest, "")]
    finally:
        for client in clients.values():
            client.wire.shutdown(2.0)
