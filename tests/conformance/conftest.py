"""The real servers of the suite, shared between its tests."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from lmcache_mp_safe.testing.conformance import SERVER_BEHAVIOURS, Behaviour, Flavour
from lmcache_mp_safe.testing.conformance.bench import Bench
from lmcache_mp_safe.testing.conformance.subjects import RealSubject


class RealServers:
    """One server a flavour, all started at once.

    Behaviours that let a long time pass are begun as soon as their server is up, all of them, so that they wait
    together and beside the others.
    """

    def __init__(self) -> None:
        self.subjects = {flavour: RealSubject(flavour) for flavour in Flavour}
        self._begun: dict[str, tuple[Iterator[float], float]] = {}
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        for subject in self.subjects.values():
            subject.launch()
        for subject in self.subjects.values():
            subject.ready()
        for one in SERVER_BEHAVIOURS:
            if one.flavour is Flavour.PATIENT:
                steps = one.steps(Bench(self.subjects[one.flavour]))
                self._begun[one.name] = steps, time.monotonic() + next(steps)

    def check(self, one: Behaviour) -> None:
        subject = self.subjects[one.flavour]
        if one.name in self._begun:
            steps, due = self._begun[one.name]
            time.sleep(max(0.0, due - time.monotonic()))
            assert list(steps) == []
            return
        bench = Bench(subject)
        bench.clear(force=True)
        for seconds in one.steps(bench):
            time.sleep(seconds)
        subject.close_clients()

    def close(self) -> None:
        for subject in self.subjects.values():
            subject.close()


@pytest.fixture(scope="session")
def real_servers() -> Iterator[RealServers]:
    servers = RealServers()
    yield servers
    servers.close()
