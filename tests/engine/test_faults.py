"""What a dead writer leaves behind is never served, and a server may come and go."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from lmcache_mp_safe.testing.engine import Answer, Engine, EngineSpec
from lmcache_mp_safe.testing.engine_worker import EngineProcess
from lmcache_mp_safe.testing.oracle import Tokens, compare, sessions
from lmcache_mp_safe.testing.server import LMCacheServer

pytestmark = pytest.mark.engine

MakeSpec = Callable[..., EngineSpec]

MAX_TOKENS = 12
DEADLINES = {"lmcache.mp.mq_timeout": 10, "lmcache.mp.safe.lookup_timeout_s": 3}  # the connector's own


def prompt_of(seed: int) -> Tokens:
    (session,) = sessions(seed, count=1, turns=1, system_tokens=1300)
    return session.prompt([])


def reserve_and_copy_nothing(engine: Engine) -> int:
    """The worker loses every store job: slots are reserved and never written. Returns the id it is registered under."""
    worker = engine.worker_connector.worker_half
    begin_step = worker.begin_step

    def without_stores(plan: object) -> None:
        import msgspec

        begin_step(msgspec.structs.replace(plan, stores=()))  # type: ignore[type-var]

    worker.begin_step = without_stores
    instance: int = engine.connector.scheduler_half.wire._link.connection.instance
    return instance


def unregister(server: LMCacheServer, instance: int) -> None:
    """What the server does to an instance that has been silent for long enough."""
    from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

    client = RequestClientFactory.create(server.url)
    try:
        assert client.unregister_kv_cache_engine_driven_context(instance).wait(5)
    finally:
        client.close()


def test_object_whose_writer_was_killed_is_a_miss_once_and_mended(
    make_spec: MakeSpec, server: LMCacheServer, salt: str
) -> None:
    prompt = prompt_of(21)
    dying = EngineProcess(make_spec())
    try:
        instance = dying.run(reserve_and_copy_nothing)
        dying.start_generate([prompt], MAX_TOKENS, salts=[salt])
        time.sleep(3)
    finally:
        dying.kill()
    unregister(server, instance)
    with Engine(make_spec()) as engine:
        counters = engine.connector.scheduler_half.counters
        (reference,) = engine.generate([prompt], MAX_TOKENS, salts=[f"{salt}-reference"])
        (miss,) = engine.generate([prompt], MAX_TOKENS, salts=[salt])
        assert miss.external_tokens == 0
        assert counters["seals_rejected"] > 0, "the server did not even serve the half-written object"
        assert compare(reference, miss) is None
        engine.drain()
        engine.reset_prefix_cache()
        answers = []
        for _ in range(3):  # what a lookup rejects it rejects in one go; chunks and boundary may be mended one by one
            answers += engine.generate([prompt], MAX_TOKENS, salts=[salt])
            engine.drain()
            engine.reset_prefix_cache()
        assert counters["objects_mended"] > 0
        assert answers[-1].external_tokens == 1920 or answers[-1].external_tokens >= 1280
        assert [compare(reference, answer) for answer in answers] == [None] * 3
        assert engine.held_blocks() == 0


@pytest.mark.old_vllm
def test_server_restart_costs_hits_and_nothing_else(make_spec: MakeSpec, salt: str) -> None:
    prompt = prompt_of(22)
    with (
        LMCacheServer(l1_size_gb=0.25) as own,
        Engine(make_spec(extra={"lmcache.mp.port": own.port, **DEADLINES})) as engine,
    ):
        (reference,) = engine.generate([prompt], MAX_TOKENS, salts=[f"{salt}-reference"])

        def ask() -> Answer:
            engine.drain()
            engine.reset_prefix_cache()
            return engine.generate([prompt], MAX_TOKENS, salts=[salt])[0]

        first, hit = ask(), ask()
        assert (first.external_tokens, compare(reference, first)) == (0, None)
        assert hit.external_tokens > 0
        own.kill()
        away = ask()
        assert (away.external_tokens, compare(reference, away)) == (0, None)
        own.start()
        wait_until_up(engine)
        again, back = ask(), ask()
        assert (again.external_tokens, compare(reference, again)) == (0, None)
        assert (back.external_tokens, compare(reference, back)) == (hit.external_tokens, None)
        engine.drain()
        assert engine.connector.scheduler_half.wire.epoch == 2
        assert engine.held_blocks() == 0


def wait_until_up(engine: Engine, deadline_s: float = 60.0) -> None:
    half = engine.connector.scheduler_half
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        half._advance(time.monotonic())
        if half.wire.up:
            return
        time.sleep(0.05)
    raise AssertionError(f"not up again: {half.wire.why_down}")


@pytest.mark.old_vllm
def test_load_that_fails_is_recomputed_and_the_engine_lives(make_spec: MakeSpec, salt: str) -> None:
    prompt = prompt_of(23)
    with Engine(make_spec()) as engine:
        (reference,) = engine.generate([prompt], MAX_TOKENS, salts=[f"{salt}-reference"])
        engine.generate([prompt], MAX_TOKENS, salts=[salt])
        engine.drain()
        engine.reset_prefix_cache()
        spoil_after_promise(engine)
        (answer,) = engine.generate([prompt], MAX_TOKENS, salts=[salt])
        counters = engine.connector.scheduler_half.counters
        assert counters["loads_failed"] == 1
        assert compare(reference, answer) is None
        engine.drain()
        engine.reset_prefix_cache()
        (hit,) = engine.generate([prompt], MAX_TOKENS, salts=[salt])
        assert counters["objects_mended"] >= 1
        assert hit.external_tokens > 0
        assert compare(reference, hit) is None
        engine.drain()
        assert engine.held_blocks() == 0


def spoil_after_promise(engine: Engine) -> None:
    """Flip one payload byte of the first load's last object, after its seal was checked."""
    worker = engine.worker_connector.worker_half
    begin_step = worker.begin_step

    def spoiling(plan: object) -> None:
        for load in plan.loads:  # type: ignore[attr-defined]
            worker.begin_step = begin_step
            slot = load.objects[-1].slots[0]
            worker._use(plan.segment)  # type: ignore[attr-defined]
            worker._pool.view(slot + 100, 1)[:] ^= 1
        begin_step(plan)

    worker.begin_step = spoiling


@pytest.mark.old_vllm
def test_after_a_cache_reset_nothing_from_before_is_hit(make_spec: MakeSpec, salt: str) -> None:
    prompt = prompt_of(24)
    with Engine(make_spec()) as engine:

        def ask() -> Answer:
            engine.drain()
            engine.reset_prefix_cache()
            return engine.generate([prompt], MAX_TOKENS, salts=[salt])[0]

        first, hit = ask(), ask()
        assert (first.external_tokens, hit.external_tokens > 0) == (0, True)
        engine.drain()
        assert engine.scheduler.reset_connector_cache()
        wait_until_up(engine)
        after = ask()
        assert (after.external_tokens, compare(first, after)) == (0, None)
        again = ask()
        assert (again.external_tokens, compare(first, again)) == (hit.external_tokens, None)
        engine.drain()
        assert engine.held_blocks() == 0
