"""Engines and requests beside each other: storing and loading the same at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lmcache_mp_safe.scheduler.phases import Phase
from lmcache_mp_safe.testing.engine import EngineSpec
from lmcache_mp_safe.testing.engine_worker import EngineProcess
from lmcache_mp_safe.testing.leftovers import inventory
from lmcache_mp_safe.testing.moments import Moment, at
from lmcache_mp_safe.testing.oracle import compare
from lmcache_mp_safe.testing.stand import DEADLINES, MAX_TOKENS, Stand, prompt_of

pytestmark = [pytest.mark.engine, pytest.mark.faults]

MakeSpec = Callable[..., EngineSpec]


def start_beside(stand: Stand, make_spec: MakeSpec) -> EngineProcess:
    return EngineProcess(make_spec(extra={"lmcache.mp.port": stand.server.port, **DEADLINES}))


@pytest.fixture(scope="module")
def beside(stand: Stand, make_spec: MakeSpec) -> Iterator[EngineProcess]:
    before = stand.before
    with start_beside(stand, make_spec) as engine:
        stand.before = inventory(stand.engine)  # a child has pipes and a log here, which are no leak
        yield engine
    stand.before = before


def answer_together(half: Any, requests: int) -> None:
    """Nobody is told of a hit before the step after the one in which so many have one: on the CPU a load is over within
    its step, and vLLM asks for one request after the other."""
    hits = half._live.hits
    poll, met = hits.poll, []

    def together(hit: Any, local_tokens: int, now: float) -> int | None:
        answer: int | None = poll(hit, local_tokens, now)
        if sum(other.record.phase is Phase.PROMISED for other in hits._book.values()) == requests:
            met.append(half._plan_number)
        return answer if met and half._plan_number > met[0] else None

    hits.poll = together


def test_two_requests_load_the_same_range_at_once(stand: Stand, salt: str) -> None:
    engine, running = stand.engine, []
    stand.ask(salt)
    engine.reset_prefix_cache()
    half = engine.connector.scheduler_half
    hits = half._live.hits
    answer_together(half, 2)
    try:
        with at(engine, Moment.LOAD, lambda: running.append(hits.running_loads)):
            answers = engine.generate([stand.prompt] * 2, MAX_TOKENS, salts=[salt] * 2)
    finally:
        del hits.poll
    assert running == [2], "they did not load at the same time"
    assert [compare(stand.reference, answer) for answer in answers] == [None, None]
    assert all(answer.external_tokens for answer in answers)
    stand.check_nothing_is_left()


def test_two_engines_store_and_load_the_same_prefixes_at_once(stand: Stand, beside: EngineProcess, salt: str) -> None:
    prompts = [prompt_of(seed, system_tokens=1300) for seed in (71, 72, 73)]
    references = stand.engine.generate(prompts, MAX_TOKENS, salts=[f"{salt}-{n}" for n in range(3)])
    hits = {"here": 0, "beside": 0}
    for _ in range(4):
        stand.engine.drain(30)
        stand.engine.reset_prefix_cache()
        beside.drain(30)
        beside.reset_prefix_cache()
        beside.start_generate(prompts, MAX_TOKENS, salts=[salt] * 3)
        answers = {"here": stand.engine.generate(prompts, MAX_TOKENS, salts=[salt] * 3), "beside": beside.finish()}
        for engine, told in answers.items():
            assert [compare(*pair) for pair in zip(references, told, strict=True)] == [None] * 3, engine
            hits[engine] += sum(answer.external_tokens > 0 for answer in told)
    assert hits["here"] >= 3
    assert hits["beside"] >= 3
    beside.drain(30)
    assert beside.held_blocks() == 0
    stand.check_nothing_is_left()
