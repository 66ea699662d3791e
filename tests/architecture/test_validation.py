"""docs/validation.md has one row for every case, and every test that it names is collected and runs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

import pytest

DOCUMENT = Path(__file__).parents[2] / "docs" / "validation.md"

CASES = (
    *(f"R{number}" for number in range(1, 75) if number not in (12, 16, 18, 19, 21)),
    "R30b",
    *(f"H{number}" for number in range(1, 35) if number not in (12, 13, 19, 21, 25)),
    *(f"S{number}" for number in range(1, 27)),
)


def rows(text: str) -> list[tuple[str, list[str]]]:
    """(case, tests it names) of every row."""
    found = re.findall(r"^\| ([RHS]\d+b?) \|(.*)\|$", text, re.MULTILINE)
    return [(case, re.findall(r"`(tests/[\w/]+\.py::\w+)`", rest)) for case, rest in found]


def faults(text: str, tests: Mapping[str, bool], cases: Collection[str]) -> list[str]:
    """What is wrong with the table. `tests`: whether each collected test runs."""
    table = rows(text)
    listed = [case for case, _ in table]
    wrong = [f"{case} has {listed.count(case)} rows" for case in cases if listed.count(case) != 1]
    wrong += [f"{case} is no case" for case in listed if case not in cases]
    wrong += [f"{case} names no test" for case, named in table if not named]
    for case, named in table:
        wrong += [f"{case}: {test} is not collected" for test in named if test not in tests]
        wrong += [f"{case}: {test} is skipped" for test in named if not tests.get(test, True)]
    return wrong


def runs(item: pytest.Item) -> bool:
    conditions = [mark.args[0] for mark in item.iter_markers("skipif")]
    return item.get_closest_marker("skip") is None and item.get_closest_marker("xfail") is None and not any(conditions)


def by_name(items: Iterable[pytest.Item]) -> dict[str, bool]:
    """Test without its parameters -> whether one set of them runs."""
    found: dict[str, bool] = {}
    for item in items:
        name = item.nodeid.partition("[")[0]
        found[name] = found.get(name, False) or runs(item)
    return found


def test_every_case_has_a_row_whose_tests_are_collected_and_run(collected_tests: list[pytest.Item]) -> None:
    text = DOCUMENT.read_text()
    tests = by_name(collected_tests)
    files = {test.partition("::")[0] for _, named in rows(text) for test in named}
    missing = files - {name.partition("::")[0] for name in tests}
    if missing and not all((DOCUMENT.parents[1] / file).exists() for file in missing):
        raise AssertionError(f"cited files that do not exist: {sorted(missing)}")
    if missing:
        pytest.skip("needs a run that collects all tests, as `make test` does")
    assert faults(text, tests, CASES) == []


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("", "R1 has 0 rows"),
        ("| R1 | a | `tests/x.py::test_x` | held |\n| R1 | a | `tests/x.py::test_x` | held |", "R1 has 2 rows"),
        ("| R1 | a | no test | held |", "R1 names no test"),
        ("| R1 | a | `tests/x.py::test_gone` | held |", "R1: tests/x.py::test_gone is not collected"),
        ("| R1 | a | `tests/x.py::test_skipped` | held |", "R1: tests/x.py::test_skipped is skipped"),
        ("| R1 | a | `tests/x.py::test_x` | held |\n| R9 | a | `tests/x.py::test_x` | held |", "R9 is no case"),
    ],
)
def test_the_check_on_the_table_can_fail(row: str, said: str) -> None:
    assert faults(row, {"tests/x.py::test_x": True, "tests/x.py::test_skipped": False}, ["R1"]) == [said]


def test_a_right_row_is_not_accused() -> None:
    assert faults("| R1 | a | `tests/x.py::test_x` | held |", {"tests/x.py::test_x": True}, ["R1"]) == []
