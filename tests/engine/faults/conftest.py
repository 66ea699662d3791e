"""One engine and one server for all faults of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from lmcache_mp_safe.testing.engine import Engine, EngineSpec
from lmcache_mp_safe.testing.server import LMCacheServer
from lmcache_mp_safe.testing.stand import DEADLINES, Stand, prompt_of


@pytest.fixture(scope="module")
def stand(request: pytest.FixtureRequest, make_spec: Callable[..., EngineSpec]) -> Iterator[Stand]:
    """A module may say how large the server's pool is, and how the engine speculates."""
    speculation = getattr(request.module, "SPECULATION", "none")
    with (
        LMCacheServer(l1_size_gb=getattr(request.module, "POOL_GB", 0.25)) as own,
        Engine(make_spec(extra={"lmcache.mp.port": own.port, **DEADLINES}, speculation=speculation)) as engine,
    ):
        yield Stand.of(engine, own, prompt_of(31))
