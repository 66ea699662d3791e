"""What is looked for in an answer. Pure functions of what was received.

Near-tie or corruption: at temperature 0 two runs may differ where the two best tokens are as good as equal, since sums
come out differently in batches of another shape. A wrong prefix makes the model say what it would hardly have said. So
what counts at the first differing token is the *distance*: by how much the baseline preferred its own token to the one
the other server said, in nats.
"""

from __future__ import annotations

import enum
import unicodedata
from dataclasses import dataclass, field

NEAR_TIE_NATS = 0.5
_ALLOWED_CONTROL = frozenset("\n\r\t")
_LOOP_PERIOD, _LOOP_REPEATS, _LOOP_CHARACTERS = 64, 6, 48
_RUN_AWAY, _RUN_AWAY_TOKENS = 4, 64


@dataclass(frozen=True)
class Token:
    """One generated token, its log-probability in nats, and the best ones at its place, itself perhaps among them."""

    text: str
    logprob: float
    best: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Answer:
    """What a server said to one request.

    Attributes:
        cached_tokens: prompt tokens from a cache; None where the server does not say.
        ttft_s: seconds to the first token. at_s: seconds since the run began, when it was asked.
    """

    text: str
    tokens: tuple[Token, ...]
    finish: str
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    ttft_s: float = 0.0
    at_s: float = 0.0


class Flaw(enum.StrEnum):
    """What an answer shows by itself, or against the length of the baseline's."""

    REPLACEMENT = "U+FFFD"
    CONTROL = "control character"
    LOOP = "repetition loop"
    RUN_AWAY = "length run-away"


class Kind(enum.StrEnum):
    SAME = "same"
    NEAR_TIE = "near-tie"
    FAR = "far"


@dataclass(frozen=True)
class Comparison:
    """An answer against the baseline's.

    Attributes:
        position: index of the first differing token; None if there is none.
        distance_nats: how much better the baseline's token was there; a lower bound where the other token is not among
            its best; 0 if nothing differs.
        drift_nats: largest difference of the log-probabilities of the same token before that position.
        flaws: those that the baseline's answer does not have.
    """

    kind: Kind
    position: int | None = None
    distance_nats: float = 0.0
    drift_nats: float = 0.0
    flaws: frozenset[Flaw] = field(default_factory=frozenset)

    @property
    def shift_nats(self) -> float:
        """How far the log-probabilities are off, where the tokens agree and where they part."""
        return max(self.distance_nats, self.drift_nats)


def compare(baseline: Answer, answer: Answer, near_tie_nats: float = NEAR_TIE_NATS) -> Comparison:
    """Where and how far the answer leaves the baseline's, and what is wrong with it besides."""
    pairs = list(zip(baseline.tokens, answer.tokens, strict=False))
    position = next((index for index, (ours, other) in enumerate(pairs) if ours.text != other.text), None)
    if position is None and len(baseline.tokens) != len(answer.tokens):
        position = len(pairs)  # one stopped where the other went on
    drift = max((_gap(one.logprob, other.logprob) for one, other in pairs[:position]), default=0.0)
    distance = 0.0 if position is None else _distance(baseline, answer, position)
    found = flaws(answer) - flaws(baseline) | run_away(baseline, answer)
    if max(distance, drift) > near_tie_nats:
        kind = Kind.FAR
    else:
        kind = Kind.SAME if position is None else Kind.NEAR_TIE
    return Comparison(kind, position, distance, drift, found)


def _gap(one: float, other: float) -> float:
    """Not a number is as far as can be: a broken state makes such."""
    gap = abs(one - other)
    return gap if gap == gap else float("inf")


def _distance(baseline: Answer, answer: Answer, position: int) -> float:
    """The larger of the two preferences for the own token; where one stopped, only the other has any."""
    pair = [one.tokens[position] if position < len(one.tokens) else None for one in (baseline, answer)]
    ours, other = pair
    if ours is None or other is None:
        return _end_distance(other or ours)
    return max(_preference(ours, other.text), _preference(other, ours.text))


def _preference(said: Token, instead: str) -> float:
    by_text = dict(said.best)
    lowest = min((logprob for _, logprob in said.best), default=said.logprob)
    return _gap(said.logprob, by_text.get(instead, lowest))


def _end_distance(went_on: Token | None) -> float:
    """The end has no text: what is known is how sure the server that went on was of its token."""
    others = [logprob for text, logprob in went_on.best if text != went_on.text] if went_on else []
    return _gap(went_on.logprob, max(others)) if went_on and others else 0.0


def flaws(answer: Answer) -> frozenset[Flaw]:
    """What the text shows without anything to compare it with."""
    found = set()
    if "\ufffd" in answer.text:
        found.add(Flaw.REPLACEMENT)
    if any(unicodedata.category(letter) == "Cc" and letter not in _ALLOWED_CONTROL for letter in answer.text):
        found.add(Flaw.CONTROL)
    if loops(answer.text):
        found.add(Flaw.LOOP)
    return frozenset(found)


def loops(text: str) -> bool:
    """Whether the text ends by saying the same few characters again and again."""
    for period in range(1, min(_LOOP_PERIOD, len(text) // _LOOP_REPEATS) + 1):
        length = max(period * _LOOP_REPEATS, _LOOP_CHARACTERS)
        tail = text[-length:]
        if len(text) >= length and tail[period:] == tail[:-period]:
            return True
    return False


def run_away(baseline: Answer, answer: Answer) -> frozenset[Flaw]:
    """Cut at the limit, where the baseline ended by itself long before."""
    longer = len(answer.tokens) >= max(_RUN_AWAY * len(baseline.tokens), _RUN_AWAY_TOKENS)
    away = baseline.finish == "stop" and answer.finish == "length" and longer
    return frozenset({Flaw.RUN_AWAY} if away else ())
