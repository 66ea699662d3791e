"""Tokens, and the tags that pages carry in place of numbers.

The tag of a token position is a word of 64 bits that follows from every token up to that position, as its KV does:

    attention page   one word a token: the tag of that position
    state page       the same word all over: the tag of the last token that the state has seen

Planes (one rank, one group, one layer) have masks, so that no page can be taken for another's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

BLOCK = 8  # tokens a block, in every group
VOCABULARY = 1000
_MASK = (1 << 64) - 1


def follow(tag: int, token: int) -> int:
    """The tag of the position after one with this tag."""
    mixed = ((tag ^ token) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & _MASK
    return mixed ^ (mixed >> 29)


def next_token(tag: int) -> int:
    """What the model says after a position with this tag."""
    return 1 + (tag >> 17) % VOCABULARY


def mask_of(rank: int, group: int, layer: int, weights: int) -> np.uint64:
    """What tells a plane's tags from another's. `weights`: grows when the model changes under a cache reset."""
    return np.uint64((rank * 64 + group * 8 + layer + 1) * 0x632BE59BD9B4E019 + weights * 0xD6E8FEB86659FD93 & _MASK)


class Chain:
    """Tokens and their tags, growing at the end.

    Invariant: `tags[i]` follows from `tokens[: i + 1]` and the salt.
    """

    def __init__(self, salt: str, tokens: Iterable[int], room: int) -> None:
        self.tokens: list[int] = []
        self._start = sum(byte << (8 * (index % 8)) for index, byte in enumerate(salt.encode())) & _MASK
        self._tags = np.zeros(room, np.uint64)
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        tag = self.tag(len(self.tokens))
        for token in tokens:
            tag = follow(tag, token)
            self._tags[len(self.tokens)] = tag
            self.tokens.append(token)

    def tag(self, count: int) -> int:
        """The tag after the first `count` tokens."""
        return int(self._tags[count - 1]) if count else self._start

    def tags(self, end: int) -> Words:
        """Tags of the positions [0, end), a copy."""
        return self._tags[:end].copy()

    def with_drafts(self, drafts: Sequence[int]) -> Words:
        """Tags of all positions and of drafts behind them."""
        tags = np.empty(len(self.tokens) + len(drafts), np.uint64)
        tags[: len(self.tokens)] = self._tags[: len(self.tokens)]
        tag = self.tag(len(self.tokens))
        for index, token in enumerate(drafts, len(self.tokens)):
            tag = follow(tag, token)
            tags[index] = tag
        return tags


def prompt(spec: str, salt: str) -> list[int]:
    """The prompt that a trace writes as `7:64,out:8,12:30`: 64 tokens of text 7, 8 that the model adds, 30 of text 12.

    Raises:
        ValueError: the text is no such thing.
    """
    chain = Chain(salt, (), 1 << 10)
    for part in spec.split(","):
        source, _, count = part.partition(":")
        if source == "out":
            for _ in range(int(count)):
                chain.extend([next_token(chain.tag(len(chain)))])
        else:
            chain.extend(text(int(source), int(count)))
    return chain.tokens


def text(number: int, count: int) -> list[int]:
    """The first tokens of a text."""
    random = Random(number)
    return [random.randrange(1, VOCABULARY + 1) for _ in range(count)]
