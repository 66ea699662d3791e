"""An engine is killed in the middle of a store, beside another one that looks the same prefix up."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from lmcache_mp_safe.metrics.counts import Count
from lmcache_mp_safe.testing.engine import Engine, EngineSpec
from lmcache_mp_safe.testing.engine_worker import EngineDiedError, EngineProcess
from lmcache_mp_safe.testing.leftovers import Inventory, server_inventory
from lmcache_mp_safe.testing.oracle import Tokens
from lmcache_mp_safe.testing.stand import DEADLINES, MAX_TOKENS, Stand
from lmcache_mp_safe.wire.connecting import OwnClient

pytestmark = pytest.mark.engine

COPY, SEAL, COMMIT = "slots granted, nothing copied", "copied, not sealed", "sealed, not committed"


def instance_of(engine: Engine) -> int:
    """The id under which the server keeps what the engine has reserved."""
    return int(engine.connector.scheduler_half.wire._link.connection.instance)


def die_while_storing(engine: Engine, moment: str, prompt: Tokens, salt: str) -> None:
    copier: Any = engine.worker_connector.worker_half._copier
    owner, method = {
        COPY: (copier, "_copy_out"),
        SEAL: (copier, "_seal"),
        COMMIT: (engine.connector.scheduler_half.wire, "commit"),
    }[moment]
    setattr(owner, method, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    engine.generate([prompt], MAX_TOKENS, salts=[salt])
    engine.drain(30)


def forget(url: str, instance: int) -> None:
    """What the server does with an instance that is silent for too long: it publishes what that had reserved."""
    client = OwnClient(url)
    try:
        assert client.unregister_kv_cache_engine_driven_context(instance).wait(10)
    finally:
        client.close()


def of_sessions(stand: Stand) -> Inventory:
    name = "server: active_sessions"
    return Inventory({name: server_inventory(stand.server)[name]})


@pytest.mark.faults
@pytest.mark.parametrize("moment", [COPY, SEAL, COMMIT])
def test_what_a_killed_engine_left_half_written_is_a_miss_and_is_mended(
    stand: Stand, make_spec: Callable[..., EngineSpec], salt: str, moment: str
) -> None:
    counters = stand.engine.connector.scheduler_half.counters
    mended = counters[Count.OBJECTS_MENDED]
    with EngineProcess(make_spec(extra={"lmcache.mp.port": stand.server.port, **DEADLINES})) as other:
        instance = other.run(instance_of)
        with pytest.raises(EngineDiedError, match="status -9"):
            other.run(die_while_storing, moment, stand.prompt, salt)
    sessions = of_sessions(stand)  # the server forgets them ten minutes after they were opened
    assert stand.ask(salt).external_tokens == 0, "nothing is readable yet"
    forget(stand.server.url, instance)
    struck = stand.ask(salt)
    stand.ask_until_hit(salt)
    if moment == COMMIT:
        assert counters[Count.OBJECTS_MENDED] == mended, "what is sealed is whole"
    else:
        assert struck.external_tokens == 0, "half-written objects were believed"
        assert counters[Count.OBJECTS_MENDED] > mended
    stand.check_nothing_is_left(of_the_dead=sessions)
