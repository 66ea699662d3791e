"""The table of series, and everything that must say the same: code that counts, the document, the dashboard."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections import Counter
from enum import StrEnum
from pathlib import Path

from lmcache_mp_safe.metrics import counts
from lmcache_mp_safe.metrics.dashboard import dashboard
from lmcache_mp_safe.metrics.document import table
from lmcache_mp_safe.metrics.series import SERIES, Kind, Role

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lmcache_mp_safe"
DASHBOARD = ROOT / "dashboards" / "lmcache-mp-safe.json"

GROUPS = [
    value
    for _, value in inspect.getmembers(counts, inspect.isclass)
    if issubclass(value, StrEnum) and value is not StrEnum
]


def test_everything_that_can_be_counted_is_in_exactly_one_series() -> None:
    shown = Counter(key for series in SERIES for key in series.keys)
    assert shown == Counter(key for group in GROUPS for key in group)
    assert set(shown.values()) == {1}


def test_names_are_unique_and_say_their_kind_to_prometheus() -> None:
    names = [series.name for series in SERIES]
    assert len(set(names)) == len(names)
    for series in SERIES:
        assert re.fullmatch(r"[a-z][a-z_]*[a-z]", series.name), series.name
        assert not series.name.endswith(("_total", "_bucket", "_count", "_sum"))
        assert bool(series.label) == (len(series.keys) > 1), series.name
        assert bool(series.buckets) == (series.kind is Kind.HISTOGRAM), series.name
        assert series.kind is not Kind.GAUGE or series.role is Role.SCHEDULER, "levels of ranks cannot be added up"
        labels = [series.label_value(key) for key in series.keys]
        assert len(set(labels)) == len(labels)


def names_used(path: Path) -> set[tuple[str, str]]:
    """(enumeration, member) of every `Enumeration.MEMBER` in a file; (enumeration, "*") if it is looked up by name."""
    used = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            used.add((node.value.id, node.attr))
        elif isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            used.add((node.value.id, "*"))
    return used


def test_every_key_is_counted_somewhere() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if path.parent.name in ("scheduler", "wire", "worker")]
    used = set().union(*map(names_used, files))
    unused = [
        f"{group.__name__}.{key.name}"
        for group in GROUPS
        for key in group
        if not {(group.__name__, key.name), (group.__name__, "*")} & used
    ]
    assert unused == []


def test_the_document_shows_the_table() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    shown = re.search(r"<!-- series -->\n(.*?)<!-- /series -->", text, re.DOTALL)
    assert shown is not None
    assert shown.group(1).strip() == table(), "run: python -m lmcache_mp_safe.metrics.document"


def exposed_names() -> dict[str, str]:
    """What `/metrics` shows -> the series it belongs to."""
    names = {}
    for series in SERIES:
        endings = ("_bucket", "_sum", "_count") if series.kind is Kind.HISTOGRAM else ("",)
        names |= {series.full_name + ending: series.name for ending in endings}
    return names


def expressions() -> list[str]:
    return [
        target["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel.get("targets", [])
    ]


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"vllm:\w+", expression))


def test_the_dashboard_names_only_series_that_exist_and_all_of_them() -> None:
    exposed = exposed_names()
    shown = set().union(*map(names_in, expressions()))
    assert shown <= exposed.keys()
    assert {exposed[name] for name in shown} == {series.name for series in SERIES}
    assert all(names_in(expression) for expression in expressions())


def test_the_dashboard_is_the_one_that_is_made_from_the_table() -> None:
    made = "run: python -m lmcache_mp_safe.metrics.dashboard > dashboards/lmcache-mp-safe.json"
    assert json.loads(DASHBOARD.read_text()) == dashboard(), made


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels = dashboard()["panels"]
    taken = Counter(
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    )
    assert set(taken.values()) == {1}
    assert len({panel["id"] for panel in panels}) == len(panels)
