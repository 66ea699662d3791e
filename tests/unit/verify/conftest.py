"""One browser for all tests of the page."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lmcache_mp_safe.testing.browser import Browser, missing


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if missing():
        pytest.skip(f"no headless browser: {missing()}")
    with Browser() as running:
        yield running
