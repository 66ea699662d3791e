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

WORDS = 6000  # several blocks of any model: those of Qwen3-Next have 1,616 tokens
_TURNS = 4
# Of the longest prompt: what the system prompt has, and the least and the most of one turn and of one answer.
_SYSTEM_SHARE, _TURN_SHARE, _ANSWER_SHARE = 0.4, (0.06, 0.16), (0.02, 0.04)
_TOOL_WORDS = 18
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


def generated(seed: int, words: int = WORDS) -> Iterator[Session]:
    """Sessions without end; the longest prompt has about this many words, a token or more each."""
    system: Message = ("system", _tools(random.Random(seed), round(words * _SYSTEM_SHARE)))
    for number in itertools.count():
        yield tuple(_session(random.Random(f"{seed}-{number}"), number, system, words))


def _session(rng: random.Random, number: int, system: Message, words: int) -> Iterator[Request]:
    history: list[Message] = []
    for turn in range(_TURNS):
        if turn == _TURNS - 1:  # compaction
            history = [("user", f"Summary of the work so far: {_text(rng, 40)}"), ("assistant", "Understood.")]
        asked: Message = ("user", f"{_text(rng, _some(rng, words, _TURN_SHARE))} What next?")
        yield Request(number, turn, (system, *history, asked))
        history += [asked, ("assistant", _text(rng, _some(rng, words, _ANSWER_SHARE)))]
    retry: Message = ("user", f"{_text(rng, 30)} Try again, in another way.")
    yield Request(number, _TURNS, (system, *history[:-2], retry))


def _tools(rng: random.Random, words: int) -> str:
    """Descriptions of as many tools as it takes for so many words."""
    tools = (
        f"- {rng.choice(_WORDS)}_{rng.choice(_WORDS)}(arguments): {_text(rng, _TOOL_WORDS)}"
        for _ in range(0, words, _TOOL_WORDS)
    )
    return "You are a careful assistant with these tools.\n" + "\n".join(tools)


def _some(rng: random.Random, words: int, share: tuple[float, float]) -> int:
    least, most = (max(1, round(words * part)) for part in share)
    return rng.randint(least, most)


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
