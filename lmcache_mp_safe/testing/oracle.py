"""The oracle: recomputed, from vLLM's prefix cache, from the connector: the same tokens and log-probabilities.

Bit for bit. That holds where the arithmetic is the same, which `engine.ENVIRONMENT` sees to, and for prefixes that
were *prefilled*: pages made at decode time come from other kernels and differ from a recomputation by rounding, so
where decoded tokens are stored, compare with a local hit.

    turns = recompute(engine, sessions(seed=0), max_tokens=24)
    assert check_local(engine, turns, salt="local").divergent == 0
    report = check_external(engine, turns, salt="external")
    assert report.divergent == 0 and report.external_hits > 0
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from lmcache_mp_safe.testing.engine import DRAIN_DEADLINE_S, Answer
from lmcache_mp_safe.testing.models import VOCABULARY, WORD, successor

Tokens = tuple[int, ...]


class Runner(Protocol):
    """What the oracle asks of an engine: `Engine` and `EngineProcess` both."""

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: int, *, salts: Sequence[str | None] | None = None
    ) -> list[Answer]: ...

    def reset_prefix_cache(self) -> None: ...

    def drain(self, deadline_s: float) -> None: ...


# --- comparing ---------------------------------------------------------------------


@dataclass(frozen=True)
class Divergence:
    """Where an answer first leaves its reference.

    Attributes:
        position: index of the output token.
        token_differs: False where only the log-probability gives the wrong prefix away.
        logprob_gap: at that position; nan where one of the two is.
    """

    request_id: str
    position: int
    token_differs: bool
    logprob_gap: float


def compare(reference: Answer, answer: Answer) -> Divergence | None:
    """None if both have the same tokens and bit-identical log-probabilities."""
    if len(reference.token_ids) != len(answer.token_ids):
        raise ValueError(f"{answer.request_id} has {len(answer.token_ids)} tokens, not {len(reference.token_ids)}")
    rows = zip(reference.token_ids, answer.token_ids, reference.logprobs, answer.logprobs, strict=True)
    for position, (want_token, token, want_logprob, logprob) in enumerate(rows):
        if token != want_token or logprob != want_logprob:  # nan differs from everything: no model here makes one
            return Divergence(answer.request_id, position, token != want_token, abs(logprob - want_logprob))
    return None


@dataclass
class Report:
    """What a run of comparisons found."""

    requests: int = 0
    local_hits: int = 0
    external_hits: int = 0
    hit_tokens: int = 0  # external ones
    prompt_tokens: int = 0
    divergences: list[Divergence] = field(default_factory=list)

    @property
    def divergent(self) -> int:
        return len(self.divergences)

    def add(self, reference: Answer, answer: Answer) -> Divergence | None:
        """Count one answer; returns how it diverges, if it does."""
        self.requests += 1
        self.prompt_tokens += answer.prompt_tokens
        self.local_hits += answer.local_tokens > 0
        self.external_hits += answer.external_tokens > 0
        self.hit_tokens += answer.external_tokens
        divergence = compare(reference, answer)
        if divergence is not None:
            self.divergences.append(divergence)
        return divergence

    def summary(self) -> dict[str, Any]:
        """The row of a JSON report."""
        return {
            "requests": self.requests,
            "external_hits": self.external_hits,
            "hit_tokens": self.hit_tokens,
            "divergent": self.divergent,
        }


# --- conversations -----------------------------------------------------------------


@dataclass(frozen=True)
class Session:
    """One user's conversation, without the answers.

    Attributes:
        texts: what the user says before each answer; the first begins with the system prompt that all sessions share.
    """

    number: int
    texts: tuple[Tokens, ...]

    def prompt(self, answers: Sequence[Sequence[int]]) -> Tokens:
        """The prompt of the turn after these answers: everything that was said, and what the user says next."""
        said = itertools.zip_longest(self.texts[: len(answers) + 1], answers, fillvalue=())
        return tuple(token for text, answer in said for token in (*text, *answer))


def sessions(
    seed: int, *, count: int = 3, turns: int = 3, system_tokens: int = 700, turn_tokens: tuple[int, int] = (300, 900)
) -> tuple[Session, ...]:
    """Conversations that share a system prompt, made of words so that ngram drafts are accepted.

    A system prompt of at least `VOCABULARY` tokens holds every token, so that ngram never fails to find one.
    """
    rng = random.Random(seed)
    system = all_words(rng)[:system_tokens]
    system += words(rng, system_tokens - len(system))
    made = []
    for number in range(count):
        texts = [words(rng, rng.randint(*turn_tokens)) for _ in range(turns)]
        made.append(Session(number, (system + texts[0], *texts[1:])))
    return tuple(made)


def words(rng: random.Random, tokens: int) -> Tokens:
    """Random words, each begun anywhere and spelled once round."""
    spelled: list[int] = []
    while len(spelled) < tokens:
        token = rng.randrange(VOCABULARY)
        for _ in range(WORD):
            spelled.append(token)
            token = successor(token)
    return tuple(spelled[:tokens])


def all_words(rng: random.Random) -> Tokens:
    """All words of the vocabulary once, in a random order."""
    starts = rng.sample(range(0, VOCABULARY, WORD), VOCABULARY // WORD)
    return tuple(token for start in starts for token in range(start, start + WORD))


# --- the three ways to the same answer ------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """One request with its reference answer."""

    session: int
    number: int
    prompt: Tokens
    reference: Answer


Progress = Callable[[Turn, Answer, Divergence | None], None]


def recompute(
    runner: Runner, conversations: Sequence[Session], max_tokens: int, *, salt: str = "recompute"
) -> list[Turn]:
    """Hold the conversations without any reuse: each request has a salt of its own. All sessions' first turns first."""
    answers: dict[int, list[Tokens]] = {session.number: [] for session in conversations}
    turns = []
    for number in range(len(conversations[0].texts)):
        for session in conversations:
            prompt = session.prompt(answers[session.number])
            answer = runner.generate([prompt], max_tokens, salts=[f"{salt}-{session.number}-{number}"])[0]
            if answer.cached_tokens:
                raise ValueError(f"{answer.cached_tokens} tokens came from a cache: salt {salt!r} has been used before")
            answers[session.number].append(answer.token_ids)
            turns.append(Turn(session.number, number, prompt, answer))
    return turns


def check_local(runner: Runner, turns: Sequence[Turn], *, salt: str, progress: Progress | None = None) -> Report:
    """Every turn on top of vLLM's own prefix cache."""
    return _check(runner, turns, salt, progress, reset=False)


def check_external(runner: Runner, turns: Sequence[Turn], *, salt: str, progress: Progress | None = None) -> Report:
    """Every turn with vLLM's prefix cache emptied before it, so that only the connector can know the prefix."""
    return _check(runner, turns, salt, progress, reset=True)


def _check(runner: Runner, turns: Sequence[Turn], salt: str, progress: Progress | None, *, reset: bool) -> Report:
    report = Report()
    for turn, answer in _replay(runner, turns, salt, reset):
        divergence = report.add(turn.reference, answer)
        if progress is not None:
            progress(turn, answer, divergence)
    return report


def _replay(runner: Runner, turns: Sequence[Turn], salt: str, reset: bool) -> Iterator[tuple[Turn, Answer]]:
    for turn in turns:
        if reset:
            runner.drain(DRAIN_DEADLINE_S)  # a lookup does not wait for the commits before it
            runner.reset_prefix_cache()
        yield turn, runner.generate([turn.prompt], len(turn.reference.token_ids), salts=[salt])[0]
