"""Connections to the model of the server, for `wire.Wire`."""

from __future__ import annotations

from collections.abc import Callable

from lmcache.v1.multiprocess.custom_types import RegisterEngineDrivenContextResponse

from lmcache_mp_safe.errors import ServerError
from lmcache_mp_safe.testing.fake_server.client import FakeClient, Transport, at_once
from lmcache_mp_safe.testing.fake_server.server import FakeServer
from lmcache_mp_safe.wire.connecting import Connection, Target, connect


class FakeMaker:
    """Stands in for `wire.connecting.Maker`: connects on the spot, the whole way, and closes on the spot.

    Attributes:
        clients: all that were made; the newest is the one in use.
        reachable: while False, nobody answers.
    """

    def __init__(self, server: FakeServer, transport: Callable[[], Transport] | None = None) -> None:
        """
        Args:
            transport: makes what carries the calls of one client, once it is connected. By default they go at once.
        """
        self.server = server
        self.clients: list[FakeClient] = []
        self.reachable = True
        self._transport = transport
        self._target: Target | None = None

    @property
    def client(self) -> FakeClient:
        """The newest one."""
        return self.clients[-1]

    def make(self, target: Target) -> None:
        self._target = target

    def result(self) -> Connection | ServerError | None:
        if self._target is None:
            return None
        target, self._target = self._target, None
        client = FakeClient(at_once(self.server) if self.reachable else _nowhere)
        try:
            connection = connect(target, lambda url: client)
        except ServerError as error:
            return error
        if self._transport is not None:
            client.transport = self._transport()
        self.clients.append(client)
        return connection

    def close(self, connection: Connection) -> None:
        connection.client.close()
        connection.pool.close()

    def stop(self, deadline_s: float) -> None:
        pass

    def registered(self) -> RegisterEngineDrivenContextResponse:
        """The right answer to a registration."""
        return RegisterEngineDrivenContextResponse(self.server.shm_name, self.server.memory.size)


def _nowhere(call: object) -> None:
    """A transport that loses everything."""
