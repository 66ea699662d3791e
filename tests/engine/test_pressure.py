"""Blocks that are reused at once: everything that is stored and loaded is what was certified."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lmcache_mp_safe.testing.audit import audit
from lmcache_mp_safe.testing.engine import Engine, EngineSpec
from lmcache_mp_safe.testing.oracle import compare, sessions

pytestmark = pytest.mark.engine

MakeSpec = Callable[..., EngineSpec]

MAX_TOKENS = 12


def test_sessions_that_preempt_each_other_store_and_load_certified_pages_only(make_spec: MakeSpec, salt: str) -> None:
    conversations = sessions(seed=11, count=4, turns=3, system_tokens=700, turn_tokens=(600, 900))
    with Engine(make_spec(num_gpu_blocks_override=26, max_num_batched_tokens=1300, max_model_len=6400)) as engine:
        seen = audit(engine.worker_connector.worker_half, engine.connector.scheduler_half)
        answers: list[list[tuple[int, ...]]] = [[] for _ in conversations]
        preemptions = 0
        asked = []
        for _ in range(3):
            prompts = [session.prompt(told) for session, told in zip(conversations, answers, strict=True)]
            together = engine.generate(prompts, MAX_TOKENS, salts=[salt] * 4)
            preemptions += sum(answer.preemptions for answer in together)
            for told, answer in zip(answers, together, strict=True):
                told.append(answer.token_ids)
            asked += prompts
        engine.drain()
        assert preemptions > 0, "the pool is not small enough to show anything"
        # What was stored under pressure, one request at a time, against a request that stores and hits nothing else.
        for number, prompt in enumerate(asked):
            engine.reset_prefix_cache()
            (external,) = engine.generate([prompt], MAX_TOKENS, salts=[salt])
            engine.reset_prefix_cache()
            (alone,) = engine.generate([prompt], MAX_TOKENS, salts=[f"{salt}-{number}"])
            assert external.external_tokens > 0
            assert compare(alone, external) is None
            engine.drain()
        assert seen.wrong == []
        assert seen.stored > 20
        assert seen.in_slots > 20
        assert seen.loaded > 10
        assert engine.held_blocks() == 0
        engine.reset_prefix_cache(deadline_s=1.0)


def test_requests_that_share_a_prefix_in_one_step_store_what_one_alone_would(make_spec: MakeSpec, salt: str) -> None:
    with Engine(make_spec(max_num_batched_tokens=2700)) as engine:
        seen = audit(engine.worker_connector.worker_half, engine.connector.scheduler_half)
        (first, second) = (session.prompt([]) for session in sessions(seed=12, count=2, turns=1, system_tokens=1300))
        engine.generate([first, second, first], MAX_TOKENS, salts=[salt] * 3)
        check_alone(engine, [first, second], salt)
        assert seen.wrong == []
        assert seen.stored
        assert seen.loaded


@pytest.mark.old_vllm
def test_request_that_comes_back_at_a_boundary_which_another_is_just_computing(make_spec: MakeSpec, salt: str) -> None:
    with Engine(make_spec(max_num_batched_tokens=700)) as engine:
        seen = audit(engine.worker_connector.worker_half, engine.connector.scheduler_half)
        prompts = [session.prompt([]) for session in sessions(seed=13, count=3, turns=1, system_tokens=1300)]
        for number, prompt in enumerate(prompts):
            engine.submit(prompt, MAX_TOKENS, salt=salt, request_id=f"{salt}-{number}")
            engine.step()
        left = len(prompts)
        while left:
            left -= len(engine.step())
        check_alone(engine, prompts, salt)
        assert seen.wrong == []
        assert seen.stored


def check_alone(engine: Engine, prompts: list[tuple[int, ...]], salt: str) -> None:
    for number, prompt in enumerate(prompts):
        engine.drain()
        engine.reset_prefix_cache()
        (external,) = engine.generate([prompt], MAX_TOKENS, salts=[salt])
        (alone,) = engine.generate([prompt], MAX_TOKENS, salts=[f"{salt}-alone-{number}"])
        assert external.external_tokens >= 1280
        assert compare(alone, external) is None
    engine.drain()
    assert engine.held_blocks() == 0
