"""What the counts mean. Pure.

Two things are told apart. A **far divergence**, a token that the baseline would hardly have said, is not a matter of
rates while the control has none: rounding does not do that. Where the control has some too, and for flaws that a model
may have of its own, the rates are compared by Fisher's exact test.

**Another token**, near-tie or not, may be more frequent on a hit, since its sums come out differently: so it counts
only against a control that had hits too, and is never called corruption. Likewise a **shift** of log-probabilities that
is not far: how much of it is rounding, such a control says. A slightly wrong state shifts more than that.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass

from lmcache_mp_safe.verify.checks import Comparison, Flaw, Kind

LEAST_CONTROLS = 10
CORRUPT_P, SUSPICIOUS_P = 0.01, 0.2
# A shift that is more than rounding: so many times the control's largest, and at least so many nats.
_SHIFT_FACTOR, _LEAST_SHIFT_NATS = 10, 0.1
_FAR, _OTHER = "far divergence", "another token"


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
class Hits:
    """What was tested: without hits there was nothing to see.

    Attributes:
        answers: tested answers with cached tokens, local or external. external_tokens: those that the connector
            brought. None where the server does not say.
    """

    answers: int | None
    external_tokens: int | None

    def __str__(self) -> str:
        on_a_hit, external = (
            f"{count:,}" if count is not None else "?" for count in (self.answers, self.external_tokens)
        )
        return f"{on_a_hit} on a hit, {external} external tokens"


@dataclass(frozen=True)
class Judgement:
    verdict: Verdict
    why: str
    rates: Sequence[Rate]


def judge(
    tested: Sequence[Comparison], control: Sequence[Comparison], hits: Hits, *, control_has_hits: bool
) -> Judgement:
    """The verdict on a run. Whether the control had hits of vLLM's own prefix cache: see above."""
    rates = other, far, *_ = [_rate(what, tested, control) for what in (_OTHER, _FAR, *Flaw)]
    worst = min(rates[1:], key=lambda rate: rate.p)
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
    if control_has_hits and other.p < CORRUPT_P:
        why = f"{other.what}, though one as good as the baseline's: {_words(other)}: more than vLLM's own hits do"
        return Judgement(Verdict.SUSPICIOUS, why, rates)
    if control_has_hits and len(control) >= LEAST_CONTROLS and (shifts := _shifts(tested, control)):
        return Judgement(Verdict.SUSPICIOUS, shifts, rates)
    if len(control) < LEAST_CONTROLS:
        return Judgement(Verdict.UNDECIDED, f"{len(control)} control answers, {LEAST_CONTROLS} are needed", rates)
    if not (hits.answers if hits.external_tokens is None else hits.external_tokens):
        why = "no answer is known to rest on a token that the connector brought, so nothing was tested: see the notes"
        return Judgement(Verdict.UNDECIDED, why, rates)
    why = f"{len(tested)} answers ({hits}) leave the baseline no more than the baseline leaves itself"
    return Judgement(Verdict.CLEAN, why, rates)


def _rate(what: str, tested: Sequence[Comparison], control: Sequence[Comparison]) -> Rate:
    counts = [sum(_shows(one, what) for one in side) for side in (tested, control)]
    return Rate(
        what, counts[0], len(tested), counts[1], len(control), fisher(counts[0], len(tested), counts[1], len(control))
    )


def _shows(comparison: Comparison, what: str) -> bool:
    if what == _OTHER:
        return comparison.position is not None
    return comparison.kind is Kind.FAR if what == _FAR else what in comparison.flaws


def _shifts(tested: Sequence[Comparison], control: Sequence[Comparison]) -> str:
    """What to say of answers that are shifted more than the control is; empty if none is."""
    rounding = max(one.shift_nats for one in control)
    shifted = [one.shift_nats for one in tested if one.shift_nats > max(_SHIFT_FACTOR * rounding, _LEAST_SHIFT_NATS)]
    if not shifted:
        return ""
    return (
        f"{len(shifted)} of {len(tested)} answers are up to {max(shifted):.2g} nats off the baseline's, the control's"
        f" {rounding:.2g} at most: rounding hardly does that, so ask more requests"
    )


def _words(rate: Rate) -> str:
    control = f"{rate.control} of {rate.of_control} in the control"
    return f"{rate.tested} of {rate.of_tested} against {control}, p = {rate.p:.2g}"


def fisher(tested: int, of_tested: int, control: int, of_control: int) -> float:
    """Fisher's exact test, one-sided: the chance of `tested` or more if the marks fell on the answers at random."""
    marks, answers = tested + control, of_tested + of_control
    ways = math.comb(answers, marks)
    least, most = tested, min(marks, of_tested)
    return sum(math.comb(of_tested, k) * math.comb(of_control, marks - k) for k in range(least, most + 1)) / ways
