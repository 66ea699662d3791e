"""What is asked: agent-like sessions from a seed, or a user's chats. Pure: the same seed gives the same requests.

The assistant's earlier answers are part of the traffic and not what a server said, so that every server gets the same
prompts whatever it answers.

    system (tools, shared by all)  user  assistant  user  assistant  ...
    |------------- one session: each turn repeats everything before it -------------|
    compaction: the middle is replaced by a summary, so that the prefix is shared up to the system prompt only
    retry:      the last turn is asked again with another ending, so that the hit is partial
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lmcache_mp_safe.errors import ConfigError

Message = tuple[str, str]  # role, content

_TURNS = 4
_TOOLS, _TURN_WORDS, _ANSWER_WORDS = 12, (60, 220), (20, 60)
_WORDS = """
    account archive balance branch budget cache change client column commit copy count daily deploy error event
    field  file filter folder graph group index invoice issue job key label limit list log machine memory merge
    message model  module month network note number order owner page path patch plan price process query queue
    range record region  release report request result review role route row rule sample schema search server
    session shape signal size  source stage state status step store stream table target task test thread token
    trace update user value version
""".split()  # noqa: SIM905 -- one word a line is no easier to read


@dataclass(frozen=True)
class Request:
    """One prompt. Requests of one session are asked in order; sessions run beside each other."""

    session: int
    turn: int
    messages: tuple[Message, ...]

    @property
    def name(self) -> str:
        return f"session {self.session}, turn {self.turn}"


Session = tuple[Request, ...]


def generated(seed: int) -> Iterator[Session]:
    """Sessions without end."""
    system: Message = ("system", _tools(random.Random(seed)))
    for number in itertools.count():
        yield tuple(_session(random.Random(f"{seed}-{number}"), number, system))


def _session(rng: random.Random, number: int, system: Message) -> Iterator[Request]:
    history: list[Message] = []
    for turn in range(_TURNS):
        if turn == _TURNS - 1:  # compaction
            history = [("user", f"Summary of the work so far: {_text(rng, 40)}"), ("assistant", "Understood.")]
        asked: Message = ("user", f"{_text(rng, rng.randint(*_TURN_WORDS))} What next?")
        yield Request(number, turn, (system, *history, asked))
        history += [asked, ("assistant", _text(rng, rng.randint(*_ANSWER_WORDS)))]
    retry: Message = ("user", f"{_text(rng, 30)} Try again, in another way.")
    yield Request(number, _TURNS, (system, *history[:-2], retry))


def _tools(rng: random.Random) -> str:
    tools = (f"- {rng.choice(_WORDS)}_{rng.choice(_WORDS)}(arguments): {_text(rng, 18)}" for _ in range(_TOOLS))
    return "You are a careful assistant with these tools.\n" + "\n".join(tools)


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=words)).capitalize() + "."


def chats(path: Path) -> tuple[Session, ...]:
    """One session for each line of a JSONL file: `{"messages": [{"role": ..., "content": ...}, ...]}` or the bare list.

    Each user message is a turn, with everything before it as its prompt.

    Raises:
        ConfigError: the file cannot be read, or a line is no such chat.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chats {path}: {error}") from error
    sessions = [_chat(path, number, line) for number, line in enumerate(lines) if line.strip()]
    if not any(sessions):
        raise ConfigError(f"--chats {path}: no user message in it")
    return tuple(session for session in sessions if session)


def _chat(path: Path, number: int, line: str) -> Session:
    try:
        value = json.loads(line)
        raw = value["messages"] if isinstance(value, dict) else value
        messages: list[Message] = [(message["role"], message["content"]) for message in raw]
        if not all(isinstance(part, str) for message in messages for part in message):
            raise TypeError("role and content must be text")
    except (ValueError, KeyError, TypeError) as error:
        shape = '{"messages": [{"role": "user", "content": "..."}, ...]}'
        raise ConfigError(f"--chats {path}, line {number + 1}: {error!r}; a line is {shape}") from error
    turns = [index for index, (role, _) in enumerate(messages) if role == "user"]
    return tuple(Request(number, turn, tuple(messages[: end + 1])) for turn, end in enumerate(turns))


def rounds(sessions: Iterator[Session] | Sequence[Session], size: int) -> Iterator[tuple[Session, ...]]:
    """Sessions that run beside each other, a few at a time."""
    source = iter(sessions)
    while batch := tuple(itertools.islice(source, size)):
        yield batch
