"""What the counts mean. Pure.

Two things are told apart. A **far divergence**, a token that the baseline would hardly have said, is not a matter of
rates while the control has none: rounding does not do that. Where the control has some too, and for flaws that a model
may have of its own, the rates are compared by Fisher's exact test.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_mp_safe.verify.checks import Comparison, Flaw, Kind

LEAST_CONTROLS = 10
CORRUPT_P, SUSPICIOUS_P = 0.01, 0.2


class Verdict(enum.StrEnum):
    CLEAN = "clean"
    SUSPICIOUS = "suspicious"
    CORRUPT = "corrupt"
    UNDECIDED = "undecided"


EXIT_STATUS = {Verdict.CLEAN: 0, Verdict.CORRUPT: 1, Verdict.SUSPICIOUS: 3, Verdict.UNDECIDED: 3}


@dataclass(frozen=True)
class Rate:
    """How often one thing was seen, in the answers under test and in the control's.

    Attributes:
        p: chance of at least so many among the tested answers if both had the same rate.
    """

    what: str
    tested: int
    of_tested: int
    control: int
    of_control: int
    p: float


@dataclass(frozen=True)
class Judgement:
    verdict: Verdict
    why: str
    rates: tuple[Rate, ...]


def judge(tested: Sequence[Comparison], control: Sequence[Comparison], hits: int | None) -> Judgement:
    """The verdict on a run. `hits` counts tested answers with cached tokens; None where the server does not say."""
    rates = tuple(_rate(what, tested, control) for what in ("far divergence", *Flaw))
    far = rates[0]
    worst = min(rates, key=lambda rate: rate.p)
    if far.tested and not far.control and far.of_control >= LEAST_CONTROLS:
        return Judgement(
            Verdict.CORRUPT,
            f"{far.tested} of {far.of_tested} answers leave the baseline far from any "
            f"near-tie; the baseline against itself never did in {far.of_control}",
            rates,
        )
    if worst.p < CORRUPT_P:
        return Judgement(Verdict.CORRUPT, f"{worst.what}: {_words(worst)}", rates)
    if far.tested > far.control or worst.p < SUSPICIOUS_P:
        return Judgement(Verdict.SUSPICIOUS, f"{worst.what}: {_words(worst)}: ask more requests", rates)
    if len(control) < LEAST_CONTROLS:
        return Judgement(Verdict.UNDECIDED, f"{len(control)} control answers, {LEAST_CONTROLS} are needed", rates)
    if not hits:
        why = "no answer is known to have used a cached token, so nothing was tested: see the notes"
        return Judgement(Verdict.UNDECIDED, why, rates)
    return Judgement(
        Verdict.CLEAN,
        f"{len(tested)} answers, {hits} on a hit, differ from the baseline no more than the baseline from itself",
        rates,
    )


def _rate(what: str, tested: Sequence[Comparison], control: Sequence[Comparison]) -> Rate:
    counts = [sum(_shows(one, what) for one in side) for side in (tested, control)]
    return Rate(
        what, counts[0], len(tested), counts[1], len(control), fisher(counts[0], len(tested), counts[1], len(control))
    )


def _shows(comparison: Comparison, what: str) -> bool:
    return comparison.kind is Kind.FAR if what == "far divergence" else what in comparison.flaws


def _words(rate: Rate) -> str:
    control = f"{rate.control} of {rate.of_control} in the control"
    return f"{rate.tested} of {rate.of_tested} against {control}, p = {rate.p:.2g}"


def fisher(tested: int, of_tested: int, control: int, of_control: int) -> float:
    """Fisher's exact test, one-sided: the chance of `tested` or more if the marks fell on the answers at random."""
    marks, answers = tested + control, of_tested + of_control
    ways = math.comb(answers, marks)
    least, most = tested, min(marks, of_tested)
    return sum(math.comb(of_tested, k) * math.comb(of_control, marks - k) for k in range(least, most + 1)) / ways
