"""Traces: a world as a script that a person reads and the simulator runs.

    # step 41: wrong tags: ...                       comments; the first line says how the run ended
    world seed=7 shape=hybrid ...
    arrive r1 prompt=3:40,out:8 max=12 salt=
    step
      r1+24; pins 3                                  indented: what came out
    fault restart
      server has an empty pool

Lines that are not indented are commands. A replay carries them out and compares what comes out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

INDENT = "  "


class CommandError(ValueError):
    """A trace has a command that does not exist."""


@dataclass
class Trace:
    """Commands with what came out of each; `ending` says how the run ended."""

    world: str
    entries: list[tuple[str, str]] = field(default_factory=list)
    ending: str = "all is well"

    def text(self) -> str:
        lines = [f"# {line}" for line in self.ending.splitlines()]
        lines.append(f"world {self.world}")
        for command, outcome in self.entries:
            lines.append(command)
            lines += [INDENT + line for line in outcome.splitlines()]
        return "\n".join(lines) + "\n"

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.text())


def read_trace(text: str) -> Trace:
    """
    Raises:
        ValueError: there is no `world` line, or an outcome without a command.
    """
    trace: Trace | None = None
    ending: list[str] = []
    for line in text.splitlines():
        if line.startswith("#"):
            ending.append(line.lstrip("# "))
        elif line.startswith("world "):
            trace = Trace(line.removeprefix("world "), ending="\n".join(ending))
        elif trace is None:
            raise ValueError("a trace begins with a line `world seed=... shape=...`")
        elif line.startswith(INDENT):
            if not trace.entries:
                raise ValueError(f"{line!r} comes out of no command")
            command, outcome = trace.entries[-1]
            trace.entries[-1] = (command, f"{outcome}\n{line.removeprefix(INDENT)}".lstrip("\n"))
        elif line.strip():
            trace.entries.append((line.strip(), ""))
    if trace is None:
        raise ValueError("a trace begins with a line `world seed=... shape=...`")
    return trace


def words_of(command: str) -> tuple[str, list[str], dict[str, str]]:
    """Verb, plain words and `name=value` words of a command."""
    verb, *rest = command.split()
    values = dict(word.split("=", 1) for word in rest if "=" in word)
    return verb, [word for word in rest if "=" not in word], values


def first_difference(recorded: Trace, replayed: Trace) -> str | None:
    """The first command that had another outcome, if any."""
    for number, (old, new) in enumerate(_pairs(recorded, replayed), start=1):
        if old != new:
            return f"command {number}, {old[0]!r}: recorded {old[1]!r}, now {new[1]!r}"
    return None


def _pairs(one: Trace, two: Trace) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
    yield from zip(one.entries, two.entries, strict=False)
