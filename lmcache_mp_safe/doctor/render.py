"""Findings for people and for programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from lmcache_mp_safe.doctor.facts import Facts
from lmcache_mp_safe.doctor.findings import Finding, Level

Sections = Mapping[str, Sequence[Finding]]

_STYLES = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}


def page(sections: Sections) -> RenderableType:
    """One table: section, level, what was found, and what to do beneath it."""
    table = Table(show_header=False, box=None, padding=(0, 1), pad_edge=False)
    table.add_column("section", style="bold", no_wrap=True)
    table.add_column("level", no_wrap=True)
    table.add_column("text", overflow="fold")
    for title, findings in sections.items():
        for index, finding in enumerate(findings):
            table.add_row("" if index else title, Text(finding.level.value, _STYLES[finding.level]), _text(finding))
    return table


def _text(finding: Finding) -> Text:
    text = Text(finding.text)  # no markup: names and messages of others may look like it
    if finding.remedy:
        text.append(f"\n-> {finding.remedy}", "cyan")
    return text


def summary(sections: Sections) -> str:
    """The last line of the page."""
    counts = count(sections)
    return f"{counts['problem']} problem(s), {counts['warning']} warning(s)"


def count(sections: Sections) -> dict[str, int]:
    levels = [finding.level for findings in sections.values() for finding in findings]
    return {level.value: levels.count(level) for level in Level}


def as_json(facts: Facts, sections: Sections) -> dict[str, Any]:
    """Findings by section, how many of each level, and the facts that they rest on."""
    return {
        "counts": count(sections),
        "sections": msgspec.to_builtins(dict(sections)),
        "facts": msgspec.to_builtins(facts),
    }
