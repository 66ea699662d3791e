"""The oracle on a real engine without any connector: it holds where it should, and fails where it should."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lmcache_mp_safe.testing.engine import Engine, EngineSpec
from lmcache_mp_safe.testing.models import ModelKind
from lmcache_mp_safe.testing.oracle import Turn, check_local, compare, recompute, sessions

pytestmark = [pytest.mark.engine, pytest.mark.old_vllm]

MAX_TOKENS = 24
KINDS: dict[ModelKind, int | None] = {"hybrid": None, "attention": 32, "window": 32}


@pytest.fixture(
    scope="module", params=["hybrid", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("attention", "window"))]
)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp(request.param)
    with Engine(EngineSpec(str(path), kind=request.param, block_size=KINDS[request.param])) as engine:
        yield engine


@pytest.fixture(scope="module")
def turns(engine: Engine) -> list[Turn]:
    return recompute(engine, sessions(seed=1, count=2, turns=2), MAX_TOKENS)


def test_recomputing_twice_gives_the_same_bits(engine: Engine, turns: list[Turn]) -> None:
    again = recompute(engine, sessions(seed=1, count=2, turns=2), MAX_TOKENS, salt="again")
    assert [compare(first.reference, second.reference) for first, second in zip(turns, again, strict=True)] == [
        None
    ] * 4


def test_a_local_hit_gives_the_same_bits_as_recomputing(engine: Engine, turns: list[Turn]) -> None:
    # A hit on tokens that were decoded differs by rounding (attention: 24 of them may fill a 32-token block), so every
    # prompt is prefilled once, and hit the second time. Without recurrent layers a hit is computed in steps of other
    # lengths than the prompt was, and whether that changes the last bits is up to the kernels for this CPU.
    rounding = 0.0 if engine.spec.kind == "hybrid" else 0.01
    for turn in turns:
        engine.reset_prefix_cache()
        check_local(engine, [turn], salt="local")
        report = check_local(engine, [turn], salt="local")
        assert report.local_hits == 1
        assert [found for found in report.divergences if found.token_differs or found.logprob_gap > rounding] == []


def test_a_local_hit_gives_the_same_bits_as_the_one_before(engine: Engine, turns: list[Turn]) -> None:
    for turn in turns:
        engine.reset_prefix_cache()
        _, first, second = (engine.generate([turn.prompt], MAX_TOKENS, salts=["hits"])[0] for _ in range(3))
        assert first.cached_tokens == second.cached_tokens > 0
        assert compare(first, second) is None


def test_a_wrong_page_in_any_group_is_seen(engine: Engine, turns: list[Turn]) -> None:
    turn = turns[-1]
    for group, facts in enumerate(engine.groups):
        engine.reset_prefix_cache()
        assert check_local(engine, [turn], salt="spoilt").divergent == 0
        spoil(engine, group, facts.layers[0])
        report = check_local(engine, [turn], salt="spoilt")
        assert report.local_hits == 1
        assert report.divergent == 1, f"pages of {facts} changed, and nothing was seen"
        assert report.divergences[0].position == 0


@pytest.mark.parametrize("engine", ["hybrid"], indirect=True)
def test_the_right_state_of_another_prompt_changes_the_first_token(engine: Engine) -> None:
    engine.reset_prefix_cache()
    first, second = (session.prompt([]) for session in sessions(seed=2, count=2, turns=1, turn_tokens=(800, 800)))
    (right,) = engine.generate([first], MAX_TOKENS, salts=["state"])
    before = [set(engine.cached_blocks(group).values()) for group in range(3)]
    engine.generate([second], MAX_TOKENS, salts=["state"])
    for group in range(3):
        (layer,) = engine.groups[group].layers
        other = max(set(engine.cached_blocks(group).values()) - before[group])
        for tensor in engine.layer_caches()[layer]:
            tensor[list(before[group])] = tensor[other]
    (wrong,) = engine.generate([first], MAX_TOKENS, salts=["state"])
    divergence = compare(right, wrong)
    assert divergence is not None
    assert (divergence.position, divergence.token_differs) == (0, True)


def spoil(engine: Engine, group: int, layer: str) -> None:
    """Halve every cached page of one layer: a plausible page, and a wrong one."""
    blocks = list(engine.cached_blocks(group).values())
    for tensor in engine.layer_caches()[layer]:
        tensor[blocks] = tensor[blocks] / 2
