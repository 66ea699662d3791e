"""What one simulated world is like. Everything follows from the seed, and a trace carries it in one line."""

from __future__ import annotations

from random import Random
from typing import Literal, TypeAlias, get_args

import msgspec

Shape: TypeAlias = Literal["hybrid", "two-states", "attention", "window", "recurrent"]
Drafter: TypeAlias = Literal["none", "ngram", "mtp"]
SHAPES: tuple[Shape, ...] = get_args(Shape)


class Settings(msgspec.Struct, frozen=True):
    """One world.

    Attributes:
        seed: decides whatever is not set here: device order, network, drafts.
        shape: KV cache groups of the model.
        drafter, drafts: speculation, and draft tokens a step.
        overlap: asynchronous scheduling: step N + 1 is planned before the output of step N is processed.
        ranks: workers, each with a device of its own.
        blocks: KV cache blocks in the pool; few, so that requests are preempted.
        newest_first: a freed block is the next one to be handed out, hashed or not.
        step_tokens: most tokens in one step.
        retention: vLLM's `prefix_cache_retention_interval`; -1 is None, every state stays.
        chunk_tokens: the connector's chunk.
        state_words: size of a state page in words of 8 bytes; a large one needs several pieces.
        slots: objects that the server's pool has room for.
        pace: chance of each device to do something between two steps; a slow one finishes copies late.
        tidy: nothing is lost or late in this world, so nothing at all may be left on the server.
        lookup_s: how long the server's lookups run.
        connector: False: no connector at all. What fails then is the simulator's own.
    """

    seed: int
    shape: Shape = "hybrid"
    drafter: Drafter = "none"
    drafts: int = 0
    overlap: bool = False
    ranks: int = 1
    blocks: int = 48
    newest_first: bool = True
    step_tokens: int = 48
    retention: int = -1
    chunk_tokens: int = 16
    state_words: int = 16
    slots: int = 96
    pace: float = 0.5
    tidy: bool = False
    lookup_s: float = 0.0
    save_decode: bool = False
    eager: bool = False
    direct: bool = False
    copy_thread: bool = False
    pin_fraction: float = 0.25
    connector: bool = True

    def line(self) -> str:
        """`name=value` of each field."""
        return " ".join(f"{name}={getattr(self, name)}" for name in self.__struct_fields__)

    @classmethod
    def parse(cls, line: str) -> Settings:
        """
        Raises:
            ValueError: a field is unknown or has a wrong value.
        """
        raw = dict(word.split("=", 1) for word in line.split())
        flags = {"True": True, "False": False}
        try:
            return msgspec.convert({name: flags.get(text, text) for name, text in raw.items()}, cls, strict=False)
        except msgspec.ValidationError as error:
            raise ValueError(f"settings {line!r}: {error}") from error


def draw(seed: int) -> Settings:
    """The world of a seed."""
    random = Random(f"settings {seed}")
    shape = random.choices(SHAPES, weights=(8, 3, 3, 3, 1))[0]
    drafter: Drafter = random.choices(get_args(Drafter), weights=(4, 2, 4))[0]
    if shape == "recurrent":
        drafter = "none"
    return Settings(
        seed,
        shape=shape,
        drafter=drafter,
        drafts=0 if drafter == "none" else random.choice((1, 2, 2, 3)),
        overlap=drafter != "ngram" and random.random() < 0.5,
        ranks=random.choice((1, 1, 1, 2, 2, 3)),
        blocks=random.choice((28, 40, 56)),
        newest_first=random.random() < 0.8,
        step_tokens=random.choice((24, 32, 48, 96)),
        retention=random.choice((-1, -1, 0, 16)) if shape != "attention" else random.choice((-1, 0)),
        chunk_tokens=random.choice((8, 16, 16, 32)),
        state_words=random.choice((16, 16, 600)),
        slots=random.choice((8, 24, 64, 128)),
        pace=random.choice((0.1, 0.5, 0.9)),
        tidy=random.random() < 0.25,
        lookup_s=random.choice((0.0, 0.0, 0.05)),
        save_decode=random.random() < 0.4,
        eager=random.random() < 0.2,
        direct=random.random() < 0.3,
        copy_thread=random.random() < 0.5,
        pin_fraction=random.choice((0.1, 0.5, 1.0)),
    )
