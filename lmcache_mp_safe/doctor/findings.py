"""A finding, and what a set of them means for the exit status."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import msgspec


class Level(enum.Enum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(msgspec.Struct, frozen=True):
    """One line of the page.

    Attributes:
        name: stable; docs/troubleshoot.md explains every name of a warning or a problem.
        text: what was found, and what it leads to.
        remedy: what to do; empty if nothing has to be done.
    """

    name: str
    level: Level
    text: str
    remedy: str = ""


def ok(name: str, text: str) -> Finding:
    return Finding(name, Level.OK, text)


def warning(name: str, text: str, remedy: str) -> Finding:
    return Finding(name, Level.WARNING, text, remedy)


def problem(name: str, text: str, remedy: str) -> Finding:
    return Finding(name, Level.PROBLEM, text, remedy)


class ExitStatus(enum.IntEnum):
    OK = 0
    PROBLEM = 1
    USAGE = 2


def exit_status(findings: Sequence[Finding], *, strict: bool) -> ExitStatus:
    """1 if there is a problem, or, when strict, a warning."""
    bad = {Level.PROBLEM, Level.WARNING} if strict else {Level.PROBLEM}
    return ExitStatus.PROBLEM if any(finding.level in bad for finding in findings) else ExitStatus.OK
