"""Short turns of the process's threads while somebody wants them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from lmcache_mp_safe.turns import ShortTurns


@pytest.fixture(autouse=True)
def usual() -> Iterator[float]:
    before = sys.getswitchinterval()
    yield before
    assert sys.getswitchinterval() == before


def test_turns_are_short_until_the_last_party_is_content(usual: float) -> None:
    first, second = ShortTurns(), ShortTurns()
    first.want(True)
    second.want(True)
    first.want(False)
    assert sys.getswitchinterval() < usual
    second.want(False)
    assert sys.getswitchinterval() == usual


def test_a_party_may_want_the_same_any_number_of_times(usual: float) -> None:
    party = ShortTurns()
    party.want(True)
    party.want(True)
    party.want(False)
    assert sys.getswitchinterval() == usual
    party.want(False)
    assert sys.getswitchinterval() == usual


def test_a_wish_of_another_thread_is_not_lost(usual: float) -> None:
    """One party ends while another begins, again and again: at rest the turns are as the wishes say."""
    steady, restless = ShortTurns(), ShortTurns()

    def work() -> None:
        for _ in range(20_000):
            restless.want(True)
            restless.want(False)

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(200):
        steady.want(True)
        steady.want(False)
    steady.want(True)
    thread.join()
    assert sys.getswitchinterval() < usual
    steady.want(False)


def test_turns_that_are_shorter_already_stay_as_they_are() -> None:
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    shorter = sys.getswitchinterval()
    try:
        party = ShortTurns()
        party.want(True)
        assert sys.getswitchinterval() == shorter
        party.want(False)
    finally:
        sys.setswitchinterval(before)
