"""What this package takes for granted about the LMCache server, of the fake one and of the stock one."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache_mp_safe.testing.conformance import SERVER_BEHAVIOURS, Behaviour, Flavour
from lmcache_mp_safe.testing.conformance.bench import Bench
from lmcache_mp_safe.testing.conformance.subjects import FakeSubject


def check_fake(one: Behaviour, **settings: Any) -> None:
    """Ask the fake server.

    Raises:
        AssertionError: it behaves otherwise.
    """
    subject = FakeSubject(one.flavour, **settings)
    try:
        for seconds in one.steps(Bench(subject)):
            subject.wait(seconds)
    finally:
        subject.close()


@pytest.mark.parametrize("one", SERVER_BEHAVIOURS, ids=lambda one: one.name)
def test_fake(one: Behaviour) -> None:
    check_fake(one)


@pytest.mark.server
@pytest.mark.timeout(600)  # the first one starts four servers
@pytest.mark.parametrize(
    "one",
    sorted(SERVER_BEHAVIOURS, key=lambda one: one.flavour is Flavour.PATIENT),  # those wait longest, and come last
    ids=lambda one: one.name,
)
def test_real(one: Behaviour, real_servers: Any) -> None:
    real_servers.check(one)
