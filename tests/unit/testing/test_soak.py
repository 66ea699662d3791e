"""The soak without an engine: what users say, when memory has grown, and what makes an arm fail."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from lmcache_mp_safe.testing.models import VOCABULARY
from lmcache_mp_safe.testing.soak.memory import Growth
from lmcache_mp_safe.testing.soak.report import MOST_GROWTH_MIB, ArmReport, as_json, as_table
from lmcache_mp_safe.testing.soak.trouble import Pace, Trouble
from lmcache_mp_safe.testing.soak.users import Habits, User, system_prompts

HABITS = Habits()


def talk(seed: int, turns: int = 60) -> list[tuple[int, ...]]:
    user = User(system_prompts(HABITS, 0), HABITS, random.Random(seed))
    prompts = []
    for turn in range(turns):
        prompts.append(user.prompt())
        if turn % 7 == 6:
            user.gave_up()
        else:
            user.told((1,) * HABITS.answer_tokens)
    return prompts


def shared(first: tuple[int, ...], second: tuple[int, ...]) -> int:
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def test_a_seed_says_the_same_again_and_another_one_something_else() -> None:
    assert talk(1) == talk(1)
    assert talk(1) != talk(2)


@pytest.mark.parametrize("seed", range(5))
def test_decoding_never_fills_a_block(seed: int) -> None:
    block, answer = HABITS.block_tokens, HABITS.answer_tokens
    for prompt in talk(seed):
        assert len(prompt) // block == (len(prompt) + answer - 1) // block
        assert len(prompt) <= HABITS.most_tokens


def test_users_share_system_prompts_that_hold_every_token() -> None:
    for system in system_prompts(HABITS, 3):
        assert set(system) == set(range(VOCABULARY))
    assert len({prompt[:900] for seed in range(8) for prompt in talk(seed)}) == len(HABITS.system_tokens)


def test_conversations_go_on_and_are_cut_back_and_begin_anew() -> None:
    prompts = talk(4, turns=200)
    kept = [shared(a, b) / len(a) for a, b in itertools.pairwise(prompts)]
    assert sum(share == 1 for share in kept) > 20, "went on"
    assert sum(0.3 < share < 1 for share in kept) > 20, "branched or compacted"
    assert sum(share < 0.1 for share in kept) > 2, "began under another system prompt"


def grown(*lives: list[int]) -> int | None:
    growth = Growth(warm_s=2.0)
    for life in lives:
        growth.begin()
        for age, size in enumerate(life):
            growth.add(float(age), size)
    return growth.grown_bytes


def test_growth_counts_from_warm_and_from_medians() -> None:
    assert grown([0, 500, 900, 900, 900, 900, 900, 900]) == 0, "getting warm is not growth"
    assert grown([0, 0, 10, 10, 10, 20, 999, 20, 30, 30, 30]) == 20, "a single peak is not growth"


def test_the_life_that_grew_most_counts_and_short_ones_tell_nothing() -> None:
    assert grown([0, 0, 10, 10, 10], [0, 0, 10, 50, 90], [0, 0]) == 80
    assert grown([0, 0, 5], []) is None


CLEAN: dict[str, Any] = {"requests": 9, "compared": 9, "hits": 3}


def test_arm_that_is_clean_has_no_faults() -> None:
    arm = ArmReport("none", **CLEAN, engine_growth_mib=MOST_GROWTH_MIB, server_growth_mib=None)
    assert arm.faults == []
    assert as_json([arm])["ok"] is True
    assert as_table([arm]).row_count == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"divergences": ["at 3"]},
        {"left": {"pins": 1}},
        {"engine_growth_mib": MOST_GROWTH_MIB + 1},
        {"server_growth_mib": MOST_GROWTH_MIB + 1},
        {"counters": {"internal_errors": 1}},
        {"failure": "it died"},
        {"hits": 0},
        {"compared": 0},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_each_thing_that_is_wrong_fails_the_arm(wrong: dict[str, Any]) -> None:
    arm = ArmReport("none", **(CLEAN | wrong))
    assert arm.faults
    assert as_json([ArmReport("mtp", **CLEAN), arm])["ok"] is False


class PretendServer:
    """Notes what is done to it."""

    def __init__(self) -> None:
        self.did: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda: self.did.append(name)


def make_trouble(no_kills_after_s: float) -> tuple[PretendServer, Trouble]:
    server: Any = PretendServer()
    pace = Pace((1.0, 2.0), no_kills_after_s, away_s=(0.0, 0.0), frozen_s=(0.0, 0.0))
    trouble = Trouble(server, pace, random.Random(0), now=0.0)
    now = 0.0
    while now < 40:
        now += 0.5
        trouble.poll(now)
        if trouble._running is not None:
            trouble._running.result(5)
    trouble.end()
    return server, trouble


def test_server_is_well_after_every_trouble() -> None:
    server, trouble = make_trouble(no_kills_after_s=1000.0)
    assert trouble.kills > 3
    assert trouble.freezes > 3
    assert server.did.count("kill") == server.did.count("start") == trouble.kills
    assert server.did.count("pause") == server.did.count("resume") == trouble.freezes
    assert 0 < server.did.count("rename") < trouble.kills


def test_no_server_is_killed_once_its_memory_is_watched() -> None:
    _, trouble = make_trouble(no_kills_after_s=0.0)
    assert trouble.kills == 0
    assert trouble.freezes > 3


def test_server_that_does_not_come_back_is_told() -> None:
    server: Any = PretendServer()

    def fails() -> None:
        raise OSError("no server")

    server.start = fails
    trouble = Trouble(server, Pace((1.0, 1.0), 1e9, (0.0, 0.0), (0.0, 0.0)), random.Random(1), now=0.0)

    def go_on() -> None:
        for now in range(2, 60, 2):
            trouble.poll(float(now))
            if trouble._running is not None:
                trouble._running.exception(5)

    with pytest.raises(OSError, match="no server"):
        go_on()
