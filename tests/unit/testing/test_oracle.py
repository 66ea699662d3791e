"""The oracle without an engine: what counts as a divergence, what is counted, and what the sessions say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from lmcache_mp_safe.testing.engine import Answer
from lmcache_mp_safe.testing.models import VOCABULARY
from lmcache_mp_safe.testing.oracle import Divergence, Report, check_external, compare, recompute, sessions

REFERENCE = Answer("r", (1, 2, 3), (-0.5, -1.0, -1.5), prompt_tokens=10, cached_tokens=0, external_tokens=0)


def test_equal_answers_do_not_diverge() -> None:
    assert compare(REFERENCE, replace(REFERENCE, request_id="other", cached_tokens=8)) is None


def test_the_last_bit_of_a_logprob_is_a_divergence() -> None:
    answer = replace(REFERENCE, logprobs=(-0.5, -1.0000000000000002, -1.5))
    assert compare(REFERENCE, answer) == Divergence("r", 1, False, 1.0000000000000002 - 1.0)


def test_the_first_position_that_differs_is_named() -> None:
    answer = replace(REFERENCE, token_ids=(1, 7, 8), logprobs=(-0.5, -2.0, -1.5))
    assert compare(REFERENCE, answer) == Divergence("r", 1, True, 1.0)


def test_a_logprob_that_is_no_number_diverges() -> None:
    divergence = compare(REFERENCE, replace(REFERENCE, logprobs=(float("nan"), -1.0, -1.5)))
    assert divergence is not None
    assert divergence.position == 0


def test_answers_of_unequal_length_are_not_compared() -> None:
    with pytest.raises(ValueError, match="has 2 tokens, not 3"):
        compare(REFERENCE, replace(REFERENCE, token_ids=(1, 2), logprobs=(-0.5, -1.0)))


def test_a_report_counts_hits_and_divergences() -> None:
    report = Report()
    report.add(REFERENCE, replace(REFERENCE, cached_tokens=8, external_tokens=6))
    report.add(REFERENCE, replace(REFERENCE, cached_tokens=8, token_ids=(9, 2, 3)))
    assert report.summary() == {"requests": 2, "external_hits": 1, "hit_tokens": 6, "divergent": 1}
    assert report.local_hits == 2
    assert report.prompt_tokens == 20


def test_sessions_are_reproducible_and_share_a_system_prompt_that_holds_every_token() -> None:
    first, second, third = sessions(seed=5)
    assert (first, second, third) == sessions(seed=5)
    shared = first.texts[0][:700]
    assert shared == second.texts[0][:700] == third.texts[0][:700]
    assert set(shared) == set(range(VOCABULARY))
    assert first.texts[0] != second.texts[0]


def test_a_prompt_is_everything_said_before_and_the_next_text() -> None:
    session = sessions(seed=5)[0]
    assert session.prompt([]) == session.texts[0]
    assert session.prompt([(1, 2)]) == (*session.texts[0], 1, 2, *session.texts[1])


class PretendEngine:
    """Answers with the last token of the prompt, and finds what was asked before under the same salt, once drained."""

    def __init__(self, spoil: bool = False) -> None:
        self.spoil, self.known, self.resets = spoil, set[tuple[str, tuple[int, ...]]](), 0
        self.being_stored = set[tuple[str, tuple[int, ...]]]()

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, salts: Sequence[str | None] | None = None
    ) -> list[Answer]:
        assert salts is not None
        (prompt,), (salt,) = prompts, salts
        key = (str(salt), tuple(prompt[:700]))
        hit = 640 if key in self.known else 0
        self.being_stored.add(key)
        token = prompt[-1] + (self.spoil and hit > 0)
        return [Answer("r", (token,) * max_tokens, (-1.0,) * max_tokens, len(prompt), hit, hit)]

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def drain(self, deadline_s: float) -> None:
        self.known |= self.being_stored


def test_external_hits_are_checked_against_the_recomputation() -> None:
    engine = PretendEngine()
    turns = recompute(engine, sessions(seed=5), max_tokens=2)
    report = check_external(engine, turns, salt="external")
    assert report.summary() == {"requests": 9, "external_hits": 8, "hit_tokens": 8 * 640, "divergent": 0}
    assert engine.resets == 9


def test_a_wrong_external_hit_is_a_divergence() -> None:
    engine = PretendEngine(spoil=True)
    turns = recompute(engine, sessions(seed=5), max_tokens=2)
    assert check_external(engine, turns, salt="external").divergent == 8


def test_a_reference_that_came_from_a_cache_is_refused() -> None:
    engine = PretendEngine()
    recompute(engine, sessions(seed=5), max_tokens=2)
    engine.drain(1)
    with pytest.raises(ValueError, match="has been used before"):
        recompute(engine, sessions(seed=5), max_tokens=2)
