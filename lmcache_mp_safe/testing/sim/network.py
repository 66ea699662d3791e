"""Between clients and the server: calls arrive in order; answers come late, never, twice or out of order."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec

from lmcache_mp_safe.errors import ServerError
from lmcache_mp_safe.testing.fake_server import Call, FakeClient, FakeServer, at_once
from lmcache_mp_safe.testing.received import as_received
from lmcache_mp_safe.wire.connecting import Connection, Target, connect


class Weather(msgspec.Struct, frozen=True):
    """What happens to answers.

    Attributes:
        lose, twice, late: chance of an answer to be lost, to come twice, to be late.
        late_s: how late at most, in seconds; late ones overtake each other.
        hops_s: time an answer takes anyway.
    """

    lose: float = 0.0
    twice: float = 0.0
    late: float = 0.0
    late_s: float = 0.0
    hops_s: float = 0.0


CALM = Weather()


class Network:
    """Carries calls to one server.

    Attributes:
        weather: what happens to answers from now on.
        frozen: the server takes nothing in; calls wait.
        dead: nobody is there; what waits is lost with the process, and connecting fails.
        answered: called with each call whose answer reaches the client.
        counts: faults that happened, by kind.
    """

    def __init__(self, server: FakeServer, clock: Callable[[], float]) -> None:
        self.server = server
        self._clock = clock
        self.weather = CALM
        self.frozen = False
        self.dead = False
        self.answered: Callable[[Call], None] = lambda call: None
        self.counts: Counter[str] = Counter()
        self._waiting: deque[tuple[FakeClient, Call]] = deque()
        self._answers: list[tuple[float, int, Call, Any]] = []
        self._numbers = itertools.count()

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._answers

    def send(self, client: FakeClient, call: Call) -> None:
        """A call on its way."""
        call.arguments = tuple(map(as_received, call.arguments))
        self._waiting.append((client, call))

    def pump(self, random: Random, most: int = 64) -> None:
        """The server works through what waits, and answers that are due arrive."""
        while self._waiting and most and not (self.frozen or self.dead):
            most -= 1
            client, call = self._waiting.popleft()
            if client.closed:
                continue
            reply = self.server.handle(call.operation, call.arguments)
            if reply is not None:
                self._answer(call, reply.value, random)
        self.deliver()

    def deliver(self) -> None:
        """Answers that are due arrive."""
        now = self._clock()
        while self._answers and self._answers[0][0] <= now:
            _, _, call, value = heapq.heappop(self._answers)
            if not call.query():
                call.answer(value)
                self.answered(call)

    def _answer(self, call: Call, value: Any, random: Random) -> None:
        weather = self.weather
        if random.random() < weather.lose:
            self.counts["answer lost"] += 1
            return
        times = 1
        if random.random() < weather.twice:
            self.counts["answer twice"] += 1
            times = 2
        for _ in range(times):
            due = self._clock() + weather.hops_s
            if random.random() < weather.late:
                self.counts["answer late"] += 1
                due += random.uniform(0.0, weather.late_s)
            heapq.heappush(self._answers, (due, next(self._numbers), call, value))

    def lose_what_waits(self) -> None:
        """The process that had it is gone."""
        self._waiting.clear()


class NetworkMaker:
    """Stands in for `wire.connecting.Maker`: connects at once, the whole way, unless nobody answers."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._target: Target | None = None

    def make(self, target: Target) -> None:
        self._target = target

    def result(self) -> Connection | ServerError | None:
        if self._target is None:
            return None
        target, self._target = self._target, None
        network = self._network
        reachable = not (network.frozen or network.dead)
        client = FakeClient(at_once(network.server) if reachable else _nowhere)
        try:
            connection = connect(target, lambda url: client)
        except ServerError as error:
            return error
        client.transport = lambda call: network.send(client, call)
        return connection

    def close(self, connection: Connection) -> None:
        connection.client.close()
        connection.pool.close()

    def stop(self, deadline_s: float) -> None:
        """Nothing is under way."""


def _nowhere(call: object) -> None:
    """A transport that loses everything."""
