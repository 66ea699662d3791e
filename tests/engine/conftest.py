"""One server for all engine tests of a run; every test has salts of its own, so nothing is shared by accident."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache_mp_safe.testing.engine import EngineSpec
from lmcache_mp_safe.testing.models import ModelKind, write_model
from lmcache_mp_safe.testing.server import LMCacheServer

MakeSpec = Callable[..., EngineSpec]

# An engine process takes ten seconds to start on an idle machine, and a minute and a half on a busy one.
ENGINE_TIMEOUT_S = 400
# What is right must not depend on how fast the machine is: a lookup that is late is a miss, and a test that counts hits
# would count those too. Tests of the deadlines set their own.
PATIENCE = {"lmcache.mp.mq_timeout": 60, "lmcache.mp.safe.lookup_timeout_s": 60}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("engine") is not None:
            item.add_marker(pytest.mark.timeout(ENGINE_TIMEOUT_S))


@pytest.fixture(scope="session")
def server() -> Iterator[LMCacheServer]:
    with LMCacheServer(l1_size_gb=1) as running:
        yield running


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[ModelKind], Path]:
    """Directory of a model of this kind, written once."""
    written: dict[ModelKind, Path] = {}

    def get(kind: ModelKind) -> Path:
        if kind not in written:
            written[kind] = write_model(kind, tmp_path_factory.mktemp(kind))
        return written[kind]

    return get


_numbers = itertools.count()


@pytest.fixture
def salt() -> str:
    """A cache salt that no other test uses."""
    return f"test-{next(_numbers)}"


@pytest.fixture(scope="session")
def make_spec(server: LMCacheServer, models: Callable[[ModelKind], Path]) -> MakeSpec:
    """A spec of an engine with the connector; further settings of the connector in `extra`."""

    def make(kind: ModelKind = "hybrid", extra: dict[str, Any] | None = None, **fields: Any) -> EngineSpec:
        if kind != "hybrid":
            fields.setdefault("block_size", 32)
        address = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server.port}
        return EngineSpec(
            str(models(kind)), kind=kind, connector="safe", connector_extra=address | PATIENCE | (extra or {}), **fields
        )

    return make
