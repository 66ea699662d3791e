"""The proof that a mapped pool is the server's, against a model of the server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lmcache_mp_safe.errors import ServerError
from lmcache_mp_safe.testing.fake_server import Call, FakeClient, FakeMaker, FakeServer, SharedMemory
from lmcache_mp_safe.wire.connecting import Target

TARGET = Target("tcp://nowhere", "ns", 4096, step_s=1.0)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    memory = SharedMemory(8 * 4096)
    yield FakeServer(lambda: 0.0, memory, shm_name=memory.name)
    memory.close()


def left_on(server: FakeServer) -> tuple[int, int, int]:
    """Sessions, lookups that nobody asked about, locks."""
    locked = [stored for stored in server.objects.readable.values() if stored.reading.count]
    return len(server.sessions), len(server.lookups), len(locked)


def test_proof_leaves_nothing_on_the_server(server: FakeServer) -> None:
    maker = FakeMaker(server)
    maker.make(TARGET)
    connection = maker.result()
    assert not isinstance(connection, ServerError | None)
    assert left_on(server) == (0, 0, 0)
    maker.close(connection)


def test_instance_of_a_proof_stays_until_the_end_of_its_session_is_answered(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server works on calls side by side, and answers no end of a session whose instance is gone."""
    ended: list[Call] = []
    end, leave = FakeClient.end_session, FakeClient.unregister_kv_cache_engine_driven_context

    def watched_end(client: FakeClient, session: str) -> Call:
        ended.append(end(client, session))
        monkeypatch.setattr(ended[-1], "wait", lambda timeout: waited.append(ended[-1]) or True)
        return ended[-1]

    def watched_leave(client: FakeClient, instance: int) -> Call:
        assert waited == ended != []
        return leave(client, instance)

    waited: list[Call] = []
    monkeypatch.setattr(FakeClient, "end_session", watched_end)
    monkeypatch.setattr(FakeClient, "unregister_kv_cache_engine_driven_context", watched_leave)
    maker = FakeMaker(server)
    maker.make(TARGET)
    connection = maker.result()
    assert not isinstance(connection, ServerError | None)
    maker.close(connection)


def test_proof_that_fails_leaves_nothing_on_the_server_either(server: FakeServer) -> None:
    """A server without room is asked again and again."""
    server.objects.room.take(4096, 8)
    maker = FakeMaker(server)
    maker.make(TARGET)
    assert "pool is full" in str(maker.result())
    assert left_on(server) == (0, 0, 0)
