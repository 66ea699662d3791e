"""What a probe found: comparisons with a reference, entries audited one at a time, and a JSON of it all."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import Any

from lmcache_mp_safe.testing.oracle import Answer, compare

_BEGIN = time.monotonic()


def say(*words: object) -> None:
    print(f"[{time.monotonic() - _BEGIN:6.1f}]", *words, flush=True)


@dataclass
class Comparison:
    """Answers against their references. A hit is one to which the connector delivered something.

    Attributes:
        bit_equal: same tokens, and log-probabilities equal bit for bit. diverged: other tokens.
        first_equal: bit-equal at the first token: with speculation, later ones are computed in steps of as many tokens
            as drafts were accepted, so they may differ by rounding after the very same pages.
        largest_gap: of log-probabilities, where an answer first differs.
    """

    requests: int = 0
    local_hits: int = 0
    hits: int = 0
    hit_tokens: int = 0
    bit_equal: int = 0
    bit_equal_hits: int = 0
    first_equal: int = 0
    diverged: int = 0
    diverged_hits: int = 0
    largest_gap: float = 0.0
    differing: list[str] = field(default_factory=list)

    def add(self, name: str, reference: Answer, answer: Answer) -> None:
        hit = answer.external_tokens > 0
        divergence = compare(reference, answer)
        diverged = reference.token_ids != answer.token_ids
        self.requests += 1
        self.local_hits += answer.local_tokens > 0
        self.hits += hit
        self.hit_tokens += answer.external_tokens
        self.bit_equal += divergence is None
        self.bit_equal_hits += hit and divergence is None
        self.first_equal += divergence is None or divergence.position > 0
        self.diverged += diverged
        self.diverged_hits += hit and diverged
        if divergence is not None:
            self.largest_gap = max(self.largest_gap, divergence.logprob_gap)
            where = f"token {divergence.position}, gap {divergence.logprob_gap:.5f}"
            cached = f"{answer.local_tokens} local, {answer.external_tokens} external of {answer.prompt_tokens}"
            self.differing.append(f"{name}: {where}{', other tokens' if diverged else ''} ({cached})")


@dataclass
class Entries:
    """Stored boundaries, each asked for alone with a prompt that ends just behind it.

    Attributes:
        short_hits: hits that end before the boundary in question.
        as_alone: not the bits of a recomputation, but those of an entry for the same prefix that was stored with
            nothing else running: rounding, as with mtp, whose chunks of a prompt span boundaries.
        unmatched: neither, but the lone entry has another depth, so its bits prove nothing.
        wrong: neither. other_tokens: of wrong and unmatched, those whose token differs.
        depths: of the hits on each text's boundaries, in blocks.
    """

    boundaries: int = 0
    hits: int = 0
    short_hits: int = 0
    equal: int = 0
    as_alone: int = 0
    unmatched: int = 0
    wrong: int = 0
    other_tokens: int = 0
    largest_gap: float = 0.0
    which: list[str] = field(default_factory=list)
    depths: list[str] = field(default_factory=list)


@dataclass
class Result:
    """Everything one probe has to say."""

    arguments: dict[str, Any]
    engine: dict[str, Any] = field(default_factory=dict)
    phases: dict[str, dict[str, Any]] = field(default_factory=dict)
    left: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0
    finished: bool = False

    @property
    def ok(self) -> bool:
        return self.finished and not self.problems

    def as_json(self) -> dict[str, Any]:
        self.seconds = round(time.monotonic() - _BEGIN, 1)
        return asdict(self) | {"ok": self.ok}

    def look_for_problems(self) -> None:
        """What this package must never do, whatever the machine."""
        for name, phase in self.phases.items():
            if wrong := phase.get("audit", {}).get("wrong"):
                self.problems.append(f"{name}: {wrong} page audits failed")
            entries = phase.get("entries", {})
            if wrong := entries.get("wrong"):
                self.problems.append(f"{name}: {wrong} of {entries['boundaries']} entries are wrong")
        if any(self.left.get(what) for what in ("pins", "pending", "held_blocks")):
            self.problems.append(f"left at the end: {self.left}")
