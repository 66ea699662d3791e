"""The main promise on a real engine and a real server: an external hit is a local hit is a recomputation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from lmcache_mp_safe.testing.engine import Answer, Engine, EngineSpec, Speculation
from lmcache_mp_safe.testing.engine_worker import EngineProcess
from lmcache_mp_safe.testing.models import ModelKind
from lmcache_mp_safe.testing.oracle import Tokens, check_external, compare, recompute, sessions

pytestmark = pytest.mark.engine

MakeSpec = Callable[..., EngineSpec]

MAX_TOKENS = 16
ONE_BLOCK, SEVERAL_BLOCKS = 700, 2700  # tokens a step; a block has 640


def check_nothing_is_held(engine: Engine) -> None:
    engine.drain()
    half = engine.connector.scheduler_half
    assert engine.held_blocks() == 0
    assert half.pinned_blocks == 0
    assert set(dataclasses.astuple(half.wire.held())) == {0}
    assert half.counters["internal_errors"] == 0


def prompts(seed: int, *lengths: int) -> list[Tokens]:
    """Prompts of these lengths; each begins with all of the shorter ones."""
    (session,) = sessions(seed, count=1, turns=1, system_tokens=700, turn_tokens=(max(lengths), max(lengths)))
    return [session.prompt([])[:length] for length in lengths]


def ask(engine: Engine, prompt: Tokens, salt: str, max_tokens: int = MAX_TOKENS) -> Answer:
    return engine.generate([prompt], max_tokens, salts=[salt])[0]


def forget_locally(engine: Engine) -> None:
    engine.drain()
    engine.reset_prefix_cache()


@pytest.mark.parametrize("step_tokens", [pytest.param(ONE_BLOCK, marks=pytest.mark.old_vllm), SEVERAL_BLOCKS])
def test_external_hits_equal_recomputing(make_spec: MakeSpec, salt: str, step_tokens: int) -> None:
    check_arm(make_spec(max_num_batched_tokens=step_tokens), salt)


@pytest.mark.parametrize("speculation", ["ngram", "mtp"])
@pytest.mark.parametrize("step_tokens", [ONE_BLOCK, pytest.param(SEVERAL_BLOCKS, marks=pytest.mark.long)])
def test_external_hits_equal_recomputing_under_speculation(
    make_spec: MakeSpec, salt: str, step_tokens: int, speculation: Speculation
) -> None:
    check_arm(make_spec(max_num_batched_tokens=step_tokens, speculation=speculation), salt)


@pytest.mark.long
def test_chunks_of_several_blocks(make_spec: MakeSpec, salt: str) -> None:
    check_arm(make_spec(extra={"lmcache.mp.safe.chunk_tokens": 1000}, max_num_batched_tokens=1300), salt)


def check_arm(spec: EngineSpec, salt: str) -> None:
    with Engine(spec) as engine:
        turns = recompute(
            engine, sessions(seed=3, count=2, turns=3, system_tokens=1400), MAX_TOKENS, salt=f"{salt}-reference"
        )
        report = check_external(engine, turns, salt=salt)
        assert report.divergences == []
        assert report.external_hits >= 4
        check_nothing_is_held(engine)


@pytest.mark.old_vllm
@pytest.mark.parametrize("kind", ["attention", "window"])
def test_external_hit_equals_the_local_hit_at_the_same_boundary(
    make_spec: MakeSpec, salt: str, kind: ModelKind
) -> None:
    """Without recurrent layers vLLM splits steps anywhere, and recomputing in other steps differs by rounding."""
    with Engine(make_spec(kind)) as engine:
        for prompt in prompts(5, 300, 1330, 2532):
            ask(engine, prompt, salt)
            local = ask(engine, prompt, salt)
            forget_locally(engine)
            external = ask(engine, prompt, salt)
            forget_locally(engine)
            last_full_block = (len(prompt) - 1) // 32 * 32
            assert local.local_tokens == external.external_tokens == last_full_block
            assert last_full_block % 256 != 0, "a boundary inside a chunk is the point of this"
            assert compare(local, external) is None
        check_nothing_is_held(engine)


@pytest.mark.parametrize(
    "speculation", [*(pytest.param(kind, marks=pytest.mark.long) for kind in ("none", "ngram")), "mtp"]
)
def test_what_decoding_computed_comes_back_as_a_local_hit_would(
    make_spec: MakeSpec, salt: str, speculation: Speculation
) -> None:
    """Decoding fills the second block; with MTP the third as well, as vLLM's own hits end a block earlier then.

    vLLM caches pages of decoded tokens, but no state of theirs: the first request that goes on from there leaves one.
    """
    decoded = 700 if speculation == "mtp" else 40
    spec = make_spec(extra={"lmcache.mp.save_decode_cache": True}, speculation=speculation)
    with Engine(spec) as engine:
        first, more = prompts(6, 1260, 1400)
        told = ask(engine, first, salt, decoded).token_ids
        engine.drain()
        assert engine.connector.scheduler_half.counters["objects_stored"] >= 3, "decoded pages were not stored"
        longer = (*first, *told, *more[1300:])
        ask(engine, longer, salt)
        local = ask(engine, longer, salt)
        forget_locally(engine)
        external = ask(engine, longer, salt)
        assert external.external_tokens == local.local_tokens == 1280
        assert compare(local, external) is None
        check_nothing_is_held(engine)


def test_second_engine_process_hits_what_the_first_stored(make_spec: MakeSpec, salt: str) -> None:
    spec = make_spec()
    conversations = sessions(seed=7, count=2, turns=2)
    with EngineProcess(spec, environment={"PYTHONHASHSEED": None}) as first:
        turns = recompute(first, conversations, MAX_TOKENS, salt=f"{salt}-reference")
        check_external(first, turns, salt=salt)
        first.drain()
    with EngineProcess(spec, environment={"PYTHONHASHSEED": None}) as second:
        report = check_external(second, turns, salt=salt)
    assert report.external_hits == report.requests == 4
    assert report.divergences == []


@pytest.mark.long
def test_one_server_serves_two_models_of_different_block_sizes_at_once(make_spec: MakeSpec, salt: str) -> None:
    with EngineProcess(make_spec("hybrid")) as hybrid, EngineProcess(make_spec("attention")) as attention:
        for prompt in prompts(8, 1300, 2000):
            answers = {}
            for name, engine in (("hybrid", hybrid), ("attention", attention)):
                engine.generate([prompt], MAX_TOKENS, salts=[salt])
                answers[name] = engine.generate([prompt], MAX_TOKENS, salts=[salt])[0]
            for name, engine in (("hybrid", hybrid), ("attention", attention)):
                engine.drain()
                engine.reset_prefix_cache()
                external = engine.generate([prompt], MAX_TOKENS, salts=[salt])[0]
                assert external.external_tokens == answers[name].local_tokens > 0
                assert compare(answers[name], external) is None
                engine.drain()
                engine.reset_prefix_cache()


def test_two_ranks_each_store_and_load_their_own_pages(make_spec: MakeSpec, salt: str) -> None:
    """Tensor parallel size 2 in two worker processes: one object holds a slice of each rank."""
    with EngineProcess(make_spec(tensor_parallel_size=2)) as engine:
        turns = recompute(engine, sessions(seed=9, count=1, turns=3), MAX_TOKENS, salt=f"{salt}-reference")
        report = check_external(engine, turns, salt=salt)
        engine.drain()
        assert engine.run(ranks_and_slices) == (2, 2)
        assert engine.held_blocks() == 0
    assert report.divergences == []
    assert report.external_hits >= 1  # two at best; on a busy machine a lookup may get no answer in time


def ranks_and_slices(engine: Engine) -> tuple[int, int]:
    objects = engine.connector.scheduler_half.objects
    return len(objects.ranks), len(objects.layout.slices)
