"""What has to hold before anything is imported, and what was collected before anything was deselected."""

from __future__ import annotations

import os

import hypothesis
import pytest

from lmcache_mp_safe.testing.engine import ENVIRONMENT

# LMCache brings in numba, which reads its number of threads on import and does not let an engine change it later.
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

# How long one example takes says how busy the machine is. Whole tests have a time limit.
hypothesis.settings.register_profile("any machine", deadline=None)
hypothesis.settings.load_profile("any machine")
_COLLECTED = pytest.StashKey[list[pytest.Item]]()


def pytest_itemcollected(item: pytest.Item) -> None:
    item.config.stash.setdefault(_COLLECTED, []).append(item)


@pytest.fixture
def collected_tests(request: pytest.FixtureRequest) -> list[pytest.Item]:
    """Every test of this run, those that a mark deselects included."""
    return request.config.stash[_COLLECTED]
