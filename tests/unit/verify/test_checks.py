"""What an answer shows: flaws of its text, and how far it leaves the baseline's."""

from __future__ import annotations

import functools
import math

import pytest

from lmcache_mp_safe.verify.checks import Answer, Comparison, Flaw, Kind, Token, compare, flaws
from lmcache_mp_safe.verify.judge import Hits, Verdict, fisher
from lmcache_mp_safe.verify.judge import judge as judge_against


def answer(*tokens: Token, text: str | None = None, finish: str = "length") -> Answer:
    return Answer(text if text is not None else "".join(token.text for token in tokens), tokens, finish)


SURE = Token("yes", -0.01, (("yes", -0.01), ("no", -6.0)))
OTHERWISE = Token("no", -0.01, (("no", -0.01), ("yes", -6.0)))
TIED = Token("yes", -0.69, (("yes", -0.69), ("no", -0.70)))
TIED_OTHERWISE = Token("no", -0.69, (("no", -0.69), ("yes", -0.70)))


@pytest.mark.parametrize(
    ("text", "flaw"),
    [
        ("good \ufffd bad", Flaw.REPLACEMENT),
        ("good \x07 bad", Flaw.CONTROL),
        ("so " + "again and " * 10, Flaw.LOOP),
        ("x" * 48, Flaw.LOOP),
    ],
)
def test_each_flaw_of_a_text_is_found_and_no_other(text: str, flaw: Flaw) -> None:
    assert flaws(answer(text=text)) == {flaw}


@pytest.mark.parametrize("text", ["", "one line\nand\tanother", "x" * 47, "again and " * 4, "ha ha ha"])
def test_ordinary_text_has_no_flaw(text: str) -> None:
    assert flaws(answer(text=text)) == frozenset()


def test_flaws_that_the_baseline_has_too_do_not_count() -> None:
    both = answer(SURE, text="\ufffd")
    assert compare(both, both).flaws == frozenset()


def test_answer_that_goes_on_where_the_baseline_ended_is_a_run_away() -> None:
    short, long = answer(*[SURE] * 10, finish="stop"), answer(*[SURE] * 64)
    assert Flaw.RUN_AWAY in compare(short, long).flaws
    assert Flaw.RUN_AWAY not in compare(answer(*[SURE] * 64), long).flaws


def test_tokens_that_were_as_good_as_equal_are_a_near_tie() -> None:
    found = compare(answer(SURE, TIED), answer(SURE, TIED_OTHERWISE))
    assert (found.kind, found.position) == (Kind.NEAR_TIE, 1)


@pytest.mark.parametrize("other", [OTHERWISE, TIED_OTHERWISE])
def test_token_that_one_of_the_two_would_hardly_have_said_is_far(other: Token) -> None:
    assert compare(answer(SURE), answer(other)).kind is Kind.FAR
    assert compare(answer(other), answer(SURE)).kind is Kind.FAR


@pytest.mark.parametrize("logprob", [-3.0, -math.inf, math.nan])
def test_same_tokens_with_log_probabilities_of_another_prefix_are_far(logprob: float) -> None:
    found = compare(answer(SURE), answer(Token("yes", logprob, SURE.best)))
    assert (found.kind, found.position) == (Kind.FAR, None)


def test_end_that_the_other_server_was_sure_not_to_reach_is_far() -> None:
    assert compare(answer(SURE, SURE, finish="stop"), answer(SURE, SURE, SURE)).kind is Kind.FAR
    assert compare(answer(SURE, TIED), answer(SURE)).kind is Kind.NEAR_TIE


HITS = Hits(20, 12800)
SAME = compare(answer(SURE), answer(SURE))
judge = functools.partial(judge_against, control_has_hits=True)
FAR = compare(answer(SURE), answer(OTHERWISE))
TIE = compare(answer(TIED), answer(TIED_OTHERWISE))


def test_one_far_answer_is_corruption_while_the_control_has_none() -> None:
    assert judge([SAME] * 39 + [FAR], [SAME] * 20, hits=HITS).verdict is Verdict.CORRUPT


def test_far_answers_at_the_controls_own_rate_are_no_corruption() -> None:
    assert judge([SAME] * 38 + [FAR] * 2, [SAME] * 18 + [FAR] * 2, hits=HITS).verdict is Verdict.CLEAN
    assert judge([SAME] * 20 + [FAR] * 20, [SAME] * 19 + [FAR], hits=HITS).verdict is Verdict.CORRUPT


def test_near_ties_count_only_against_a_control_that_had_hits_too_and_are_never_corruption() -> None:
    assert judge([TIE] * 40, [SAME] * 20, hits=HITS, control_has_hits=False).verdict is Verdict.CLEAN
    assert judge([TIE] * 40, [SAME] * 20, hits=HITS).verdict is Verdict.SUSPICIOUS
    assert judge([TIE] * 40, [TIE] * 18 + [SAME] * 2, hits=HITS).verdict is Verdict.CLEAN
    assert judge([TIE] * 4 + [SAME] * 36, [SAME] * 20, hits=HITS).verdict is Verdict.CLEAN


def shifted(nats: float) -> Comparison:
    return compare(answer(SURE), answer(Token("yes", SURE.logprob - nats, SURE.best)))


def test_one_shift_that_the_controls_rounding_does_not_reach_by_far_is_suspicious() -> None:
    """A state that is a few tokens too old is not far: 0.23 to 0.42 nats were seen of it, where rounding made none."""
    assert judge([SAME] * 39 + [shifted(0.3)], [SAME] * 20, hits=HITS).verdict is Verdict.SUSPICIOUS
    assert judge([SAME] * 39 + [shifted(0.3)], [SAME] * 19 + [shifted(0.04)], hits=HITS).verdict is Verdict.CLEAN
    assert judge([SAME] * 39 + [shifted(0.09)], [SAME] * 20, hits=HITS).verdict is Verdict.CLEAN
    assert judge([SAME] * 39 + [shifted(0.3)], [SAME] * 20, hits=HITS, control_has_hits=False).verdict is Verdict.CLEAN


@pytest.mark.parametrize(
    ("controls", "hits"),
    [
        (20, Hits(0, None)),
        (20, Hits(None, None)),
        (20, Hits(20, 0)),  # all of them vLLM's own
        (20, Hits(None, 0)),
        (9, HITS),
    ],
)
def test_run_without_hits_or_with_too_few_controls_decides_nothing(controls: int, hits: Hits) -> None:
    assert judge([SAME] * 40, [SAME] * controls, hits).verdict is Verdict.UNDECIDED


def test_too_few_controls_make_a_far_answer_suspicious_only() -> None:
    assert judge([FAR] + [SAME] * 9, [SAME] * 5, hits=HITS).verdict is Verdict.SUSPICIOUS


def test_fishers_test_agrees_with_the_ladys_cups_of_tea() -> None:
    assert fisher(4, 4, 0, 4) == pytest.approx(1 / 70)
    assert fisher(3, 4, 1, 4) == pytest.approx(17 / 70)
    assert fisher(0, 5, 0, 5) == 1.0
