"""Documents that must say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from lmcache_mp_safe.scheduler.drawing import draw

ROOT = Path(__file__).parents[2]


def test_phases_in_the_architecture_document_are_drawn_from_the_table() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    drawn = re.search(r"<!-- phases -->\n(.*?)<!-- /phases -->", text, re.DOTALL)
    assert drawn is not None
    assert drawn.group(1).strip() == draw(), "run: python -m lmcache_mp_safe.scheduler.drawing"


def cited_tests(text: str) -> set[tuple[str, str]]:
    """(file, test) of every citation like `tests/unit/test_x.py::test_name`."""
    return set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text))


def test_every_test_that_a_document_cites_exists() -> None:
    citations = set()
    for document in (ROOT / "docs").glob("*.md"):
        citations |= cited_tests(document.read_text())
    missing = [
        f"{file}::{name}"
        for file, name in sorted(citations)
        if not (ROOT / file).exists() or f"def {name}(" not in (ROOT / file).read_text()
    ]
    assert missing == []
    assert citations


def test_every_invariant_has_a_row_and_cites_a_test() -> None:
    text = (ROOT / "docs" / "invariants.md").read_text()
    for number in range(1, 19):
        row = re.search(rf"^\| I{number} \|.*$", text, re.MULTILINE)
        assert row is not None, f"I{number} has no row"
        assert cited_tests(row.group(0)), f"I{number} cites no test"
