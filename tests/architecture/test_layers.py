"""Imports point downwards only, and decision code reaches no clock, socket, thread or tensor."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lmcache_mp_safe"

# Layer of each part of the package, from the bottom up. A module imports from its own layer and from below.
LAYERS = {
    "ids": 0,
    "errors": 0,
    "turns": 0,
    "contract": 1,
    "geometry": 1,
    "config": 2,
    "identity": 1,
    "announcements": 1,
    "metrics": 1,
    "wire": 3,
    "ops": 3,
    "scheduler": 4,
    "worker": 4,
    "compat": 4,
    "startup": 5,
    "connector": 6,
    "plugin": 6,
    "doctor": 7,
    "testing": 7,
    "bench": 7,
    "verify": 7,
    "cli": 8,
}
# Pairs on one layer that must not know each other.
STRANGERS = {
    ("scheduler", "worker"),
    ("wire", "ops"),
    ("scheduler", "compat"),
    ("worker", "compat"),
    ("wire", "compat"),
    ("doctor", "testing"),
}
# The one upward import: the plugin mends child processes of a CPU test engine, on an environment variable only.
ALLOWED_UP = {("plugin", "testing")}

MODULES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(module: str) -> str:
    return module.split(".")[1] if module.count(".") else ""


def own_part(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def wrong_imports(path: Path, modules: Iterator[str]) -> list[str]:
    mine = own_part(path)
    found = []
    for module in modules:
        if not module.startswith("lmcache_mp_safe."):
            continue
        other = part_of(module)
        if other not in LAYERS or (mine, other) in ALLOWED_UP:
            continue
        if LAYERS[other] > LAYERS[mine] or (mine, other) in STRANGERS or (other, mine) in STRANGERS:
            found.append(f"{path.relative_to(ROOT)} imports {module}")
    return found


@pytest.mark.parametrize("path", [p for p in MODULES if p.name != "__init__.py" or p.parent != PACKAGE], ids=str)
def test_imports_point_downwards(path: Path) -> None:
    assert own_part(path) in LAYERS, f"{path} belongs to no layer: add it to LAYERS"
    assert wrong_imports(path, imports(path)) == []


def test_the_check_on_imports_can_fail() -> None:
    path = PACKAGE / "scheduler" / "stores.py"
    assert wrong_imports(path, iter(["lmcache_mp_safe.connector"]))
    assert wrong_imports(path, iter(["lmcache_mp_safe.worker.half"]))


BANNED = {
    "scheduler": {"time", "zmq", "torch", "threading", "socket", "random", "vllm", "lmcache", "asyncio"},
    "geometry": {"time", "zmq", "threading", "socket", "random", "vllm", "lmcache"},
    "metrics": {"time", "threading", "random", "vllm", "lmcache", "torch"},
    "identity": {"time", "random", "vllm", "lmcache", "torch"},
    "wire": {"vllm"},
    "worker": {"lmcache", "zmq", "vllm"},
    "ops": {"lmcache", "zmq", "vllm"},
}


@pytest.mark.parametrize("path", [p for p in MODULES if own_part(p) in BANNED], ids=str)
def test_decision_code_reaches_nothing_that_acts(path: Path) -> None:
    roots = {module.split(".")[0] for module in imports(path)}
    assert roots & BANNED[own_part(path)] == set()


def test_versions_are_known_to_compat_only() -> None:
    for path in MODULES:
        if own_part(path) in ("compat", "testing", "cli", "startup"):
            continue
        assert "__version__" not in path.read_text().replace("__version__ =", "").replace('"__version__"', ""), path
