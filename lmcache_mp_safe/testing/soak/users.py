"""What users say: conversations over shared system prompts, continued, branched, compacted, dropped. Pure and seeded.

Prompts end where decoding stays within the block it begins in. A page that decoding fills comes from other kernels than
a prefilled one and differs by rounding; vLLM's own cache serves it like any other, so an answer on top of it could not
be compared bit for bit.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass, field

from lmcache_mp_safe.testing.oracle import Tokens, all_words, words


class Move(enum.Enum):
    """What a user does next with the conversation."""

    GO_ON = "go on"
    BRANCH = "branch"  # takes the last text back and says something else: a partial hit
    COMPACT = "compact"  # everything behind the system prompt becomes a short summary: a partial hit
    START = "start"  # a new conversation under one of the shared system prompts


@dataclass(frozen=True)
class Habits:
    """How users behave. Lengths in tokens.

    Attributes:
        most_tokens: a prompt that would be longer starts a new conversation.
        block_tokens, answer_tokens: a prompt leaves room for so many tokens in its last block.
        weights: of the moves after the first, in the order of `Move`.
        abort_share: of the requests that the user does not wait for.
    """

    system_tokens: tuple[int, ...] = (1400, 900)
    text_tokens: tuple[int, int] = (60, 500)
    summary_tokens: tuple[int, int] = (60, 200)
    most_tokens: int = 3400
    block_tokens: int = 640
    answer_tokens: int = 8
    weights: tuple[int, ...] = (6, 2, 2, 1)
    abort_share: float = 0.1

    def fits(self, tokens: int) -> bool:
        """Whether an answer to a prompt of this length stays within the prompt's last block."""
        return 0 < tokens % self.block_tokens <= self.block_tokens - self.answer_tokens


def system_prompts(habits: Habits, seed: int) -> tuple[Tokens, ...]:
    """The prompts that all users share; each holds every token, so that n-gram drafts are always found."""
    rng = random.Random(seed)
    made = []
    for length in habits.system_tokens:
        every = all_words(rng)[:length]
        made.append(every + words(rng, length - len(every)))
    return tuple(made)


@dataclass
class User:
    """One user. `prompt` is what is asked next; `told` is the answer to it."""

    systems: tuple[Tokens, ...]
    habits: Habits
    rng: random.Random
    said: list[Tokens] = field(default_factory=list)  # the system prompt, then texts and answers in turn

    def prompt(self) -> Tokens:
        move = Move.START if not self.said else self.rng.choices(list(Move), self.habits.weights)[0]
        if move is Move.BRANCH and len(self.said) > 3:
            del self.said[-2:]
        elif move is Move.COMPACT and len(self.said) > 3:
            self.said = [self.said[0], words(self.rng, self.rng.randint(*self.habits.summary_tokens)), ()]
        elif move is Move.START:
            self._start()
        text = words(self.rng, self.rng.randint(*self.habits.text_tokens))
        if self._length() + len(text) + self.habits.block_tokens > self.habits.most_tokens:
            self._start()
        self.said.append(self._trimmed(text))
        return tuple(token for part in self.said for token in part)

    def told(self, answer: Tokens) -> None:
        self.said.append(answer)

    def gave_up(self) -> None:
        """The last prompt was not waited for."""
        del self.said[-1:]

    def aborts(self) -> bool:
        return self.rng.random() < self.habits.abort_share

    def _start(self) -> None:
        self.said = [self.rng.choice(self.systems)]

    def _length(self) -> int:
        return sum(map(len, self.said))

    def _trimmed(self, text: Tokens) -> Tokens:
        while not self.habits.fits(self._length() + len(text)):
            text = (*text, *words(self.rng, 1))
        return text
