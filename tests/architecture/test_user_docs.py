"""What users are told: options, flags and commands that exist, messages that the code says, examples that fit."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from lmcache_mp_safe.cli.main import app
from lmcache_mp_safe.config import _ADDRESS_KEYS, _KEYS, OURS, STOCK, parse_config
from lmcache_mp_safe.errors import ConfigError

pytestmark = pytest.mark.timeout(300)  # imports vLLM and LMCache

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lmcache_mp_safe"
USER_DOCS = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("deploy", "migrate", "troubleshoot"))]
EXAMPLES = ROOT / "examples"


# --- options and commands -------------------------------------------------------------------------------------------


def option_names(text: str) -> set[str]:
    return {name.rstrip(".") for name in re.findall(r"lmcache\.mp\.[a-z_.]+[a-z]", text)}


@cache
def stock_options() -> frozenset[str]:
    """Every option that the installed stock connector reads, by its source."""
    package = importlib.util.find_spec("lmcache.integration.vllm")
    assert package is not None
    assert package.submodule_search_locations is not None
    folder = Path(package.submodule_search_locations[0])
    named = {
        key for path in folder.rglob("*.py") for key in re.findall(r'"lmcache\.mp\.([a-z_.]+[a-z])"', path.read_text())
    }
    members = assigned(folder / "vllm_multi_process_adapter.py", "ExtraConfigDefault", ast.Assign)
    lazy = assigned(folder / "lazy_offload_policy" / "eviction_aware.py", "EvictionAwarePolicyConfig", ast.AnnAssign)
    return frozenset(STOCK + name for name in named | members | {f"lazy_offload_{name}" for name in lazy})


def assigned(path: Path, owner: str, kind: type[ast.Assign | ast.AnnAssign]) -> set[str]:
    """Names that are assigned in the body of a class."""
    (found,) = [node for node in ast.walk(ast.parse(path.read_text())) if getattr(node, "name", "") == owner]
    assert isinstance(found, ast.ClassDef)
    statements = [node for node in found.body if isinstance(node, kind)]
    targets = [node.targets[0] if isinstance(node, ast.Assign) else node.target for node in statements]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def test_every_option_of_the_stock_connector_is_in_the_migration_table_and_no_other() -> None:
    assert {STOCK + "mq_timeout", STOCK + "lazy_offload_horizon_steps", STOCK + "use_vmm_api"} <= stock_options()
    rows = re.findall(r"^\| (`lmcache\.mp\.[^|]*)\|", (ROOT / "docs" / "migrate.md").read_text(), re.MULTILINE)
    assert option_names(" ".join(rows)) == stock_options()


def test_every_option_of_the_stock_connector_is_taken_or_refused_with_a_reason() -> None:
    unknown = parse_error(STOCK + "no_such_option")
    assert "unknown key" in unknown
    assert [option for option in stock_options() if "unknown key" in parse_error(option)] == []


def parse_error(option: str) -> str:
    """What is said about the option with a value of no type; empty if it is taken."""
    try:
        parse_config({option: None})
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("document", USER_DOCS, ids=lambda path: path.name)
def test_options_that_are_named_exist(document: Path) -> None:
    ours = {name for name in option_names(document.read_text()) if name.startswith(OURS)}
    assert ours <= set(_KEYS)
    others = option_names(document.read_text()) - ours - {STOCK.rstrip("."), OURS.rstrip(".")}
    assert others <= set(_KEYS) | set(_ADDRESS_KEYS) | stock_options()


def test_every_option_of_ours_is_in_the_readme() -> None:
    assert set(_KEYS) | set(_ADDRESS_KEYS) <= option_names((ROOT / "README.md").read_text())


@pytest.mark.parametrize("document", USER_DOCS, ids=lambda path: path.name)
def test_commands_that_are_named_exist(document: Path) -> None:
    commands = {command.callback.__name__ for command in app.registered_commands if command.callback is not None}
    assert set(re.findall(r"(?<!install )lmcache-mp-safe ([a-z]+)", document.read_text())) <= commands


# --- flags ----------------------------------------------------------------------------------------------------------


# Each parser in a process of its own: what they import warns, and takes over state.
PARSERS = {
    "lmcache server": """
        import argparse
        from lmcache.cli.commands.server import ServerCommand
        parser = argparse.ArgumentParser()
        ServerCommand().add_arguments(parser)
    """,
    # The flags of the engine; importing the ones of the web server as well takes a minute.
    "vllm serve": """
        from vllm.engine.arg_utils import AsyncEngineArgs, FlexibleArgumentParser
        parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    """,
}


@cache
def flags_of(program: str) -> frozenset[str]:
    """Every flag of `lmcache server`, or of the engine of `vllm serve`, by its own parser."""
    flags = "[flag for action in parser._actions for flag in action.option_strings]"
    code = f"{textwrap.dedent(PARSERS[program])}\nimport json\nprint(json.dumps({flags}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=250)
    return frozenset(json.loads(run.stdout.splitlines()[-1]))


def named_flags(words: Iterable[str]) -> set[str]:
    return {word.partition("=")[0] for word in words if word.startswith("--")}


def shell_commands(text: str) -> Iterator[list[str]]:
    """Words of each command in a fenced block or a script, lines that end in a backslash joined."""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        try:
            yield shlex.split(line, comments=True)
        except ValueError:
            continue


def of_program(words: list[str], program: str) -> list[str] | None:
    """What stands behind the program in a command; None if it does not run it."""
    first, second = program.split()
    for index, pair in enumerate(itertools.pairwise(words)):
        if pair == (first, second):
            return words[index + 2 :]
    return None


def commands_in_documents() -> Iterator[tuple[str, str, set[str]]]:
    for document in [*USER_DOCS, EXAMPLES / "serve.sh"]:
        text = document.read_text()
        blocks = "\n".join(re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)) if document.suffix == ".md" else text
        for words in shell_commands(blocks):
            for program in ("lmcache server", "vllm serve"):
                behind = of_program(words, program)
                if behind is not None:
                    yield document.name, program, named_flags(behind)


def test_flags_in_documents_exist_in_the_parsers_of_server_and_vllm() -> None:
    seen = set()
    for document, program, flags in commands_in_documents():
        seen.add((document, program))
        assert flags <= flags_of(program), f"{document}: {program}: {flags - flags_of(program)}"
    assert {("deploy.md", "lmcache server"), ("deploy.md", "vllm serve"), ("README.md", "lmcache server")} <= seen
    assert "--no-such-flag" not in flags_of("lmcache server") | flags_of("vllm serve")


NEEDED = {"--shm-name", "--no-l1-use-lazy", "--supported-transfer-mode"}


def test_every_server_that_is_started_lends_its_memory() -> None:
    servers = [
        (name, flags) for name, program, flags in commands_in_documents() if program == "lmcache server" and flags
    ]
    assert servers
    for name, flags in servers:
        assert flags >= NEEDED, name


# --- examples -------------------------------------------------------------------------------------------------------


def compose() -> Any:
    return yaml.safe_load((EXAMPLES / "compose.yaml").read_text())["services"]


def pod() -> Any:
    return yaml.safe_load((EXAMPLES / "kubernetes.yaml").read_text())["spec"]


@pytest.mark.parametrize(
    ("server", "engine"),
    [
        (compose()["lmcache"]["command"], compose()["vllm"]["command"]),
        (pod()["initContainers"][0]["command"], pod()["containers"][0]["command"]),
    ],
    ids=["compose", "kubernetes"],
)
def test_commands_of_the_manifests_fit(server: list[str], engine: list[str]) -> None:
    assert server[:2] == ["lmcache", "server"]
    assert NEEDED <= named_flags(server[2:]) <= flags_of("lmcache server")
    assert engine[:2] == ["vllm", "serve"]
    assert named_flags(engine[3:]) <= flags_of("vllm serve")
    (transfer,) = [word.partition("=")[2] for word in engine if word.startswith("--kv-transfer-config")]
    connector = json.loads(transfer)
    assert connector["kv_connector"] == "LMCacheMPSafeConnector"
    parse_config(connector.get("kv_connector_extra_config", {}))


def gib(size: str) -> int:
    """Of a size as compose (`72gb`) and Kubernetes (`72Gi`) write it."""
    found = re.fullmatch(r"(\d+)(gb|Gi)", size)
    assert found is not None, size
    return int(found.group(1))


def pool_gib(command: list[str]) -> int:
    (size,) = [word.partition("=")[2] for word in command if word.startswith("--l1-size-gb=")]
    return int(size)


def test_compose_shares_shared_memory_and_user_and_has_room_for_the_pool() -> None:
    services = compose()
    server, engine = services["lmcache"], services["vllm"]
    assert server["ipc"] == "shareable"
    assert engine["ipc"] == "service:lmcache"
    assert server["user"] == engine["user"]
    assert gib(server["shm_size"]) > pool_gib(server["command"])
    assert engine["depends_on"]["lmcache"]["condition"] == "service_healthy"


def test_pod_shares_shared_memory_and_user_and_has_room_for_the_pool() -> None:
    spec = pod()
    (volume,) = spec["volumes"]
    assert volume["emptyDir"]["medium"] == "Memory"
    containers = [*spec["initContainers"], *spec["containers"]]
    for container in containers:
        assert container["volumeMounts"] == [{"name": volume["name"], "mountPath": "/dev/shm"}]
        assert "securityContext" not in container
    assert isinstance(spec["securityContext"]["runAsUser"], int)
    (server,) = spec["initContainers"]
    assert server["restartPolicy"] == "Always"
    room = gib(volume["emptyDir"]["sizeLimit"])
    assert pool_gib(server["command"]) < room <= gib(server["resources"]["limits"]["memory"])


# --- messages -------------------------------------------------------------------------------------------------------

# Modules whose errors can stop a start, or appear in the log of one.
TALKING = ("config.py", "startup.py", "compat", "ops/__init__.py", "worker", "wire/connecting.py", "wire/pool.py")
TALKING += ("wire/tokens.py", "geometry/pages.py")
RAISED = ("ConfigError", "ServerError")


def literal(node: ast.expr) -> str | None:
    """Text of a string literal, with `…` for what is put in; None for another expression."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    return None


def talking_modules() -> list[Path]:
    paths = [PACKAGE / name for name in TALKING]
    return [module for path in paths for module in (path.rglob("*.py") if path.is_dir() else [path])]


def messages() -> set[str]:
    """Every text in the modules that talk."""
    trees = [ast.parse(module.read_text()) for module in talking_modules()]
    return {text for tree in trees for node in ast.walk(tree) if isinstance(node, ast.expr) and (text := literal(node))}


def raised() -> set[str]:
    """Texts that are written where an error is raised."""
    found = set()
    for module in talking_modules():
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                name, text = getattr(node.exc.func, "id", ""), literal(node.exc.args[0])
                if name in RAISED and text is not None:
                    found.add(text)
    return found


def documented() -> list[str]:
    """First column of the tables of messages in docs/troubleshoot.md: one or more texts in backticks."""
    text = (ROOT / "docs" / "troubleshoot.md").read_text()
    (section,) = re.findall(r"<!-- messages -->\n(.*?)<!-- /messages -->", text, re.DOTALL)
    cells = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    return [message for cell in cells for message in re.findall(r"`([^`]+)`", cell)]


def says(message: str, document: str) -> bool:
    """Whether the documented text stands in the message; its `…` stand for anything."""
    pieces = [re.escape(piece) for piece in document.split("…")]
    return re.search(".*".join(pieces), message, re.DOTALL) is not None


def test_every_documented_message_is_one_of_the_code() -> None:
    said = messages()
    assert [message for message in documented() if not any(says(text, message) for text in said)] == []


def test_every_error_that_can_stop_a_start_is_documented() -> None:
    assert len(raised()) > 30
    assert [text for text in sorted(raised()) if not any(says(text, message) for message in documented())] == []


def test_check_on_messages_can_fail() -> None:
    assert says("prefix caching is off, and more", "prefix caching is off")
    assert says("key … must be 3", "… must be")
    assert not says("prefix caching is on", "prefix caching is off")


def test_every_warning_and_problem_of_doctor_is_documented() -> None:
    text = (ROOT / "docs" / "troubleshoot.md").read_text()
    names = set()
    for module in (PACKAGE / "doctor" / "checks").glob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("warning", "problem", "make"):
                name = literal(node.args[0])
                assert name is not None
                names |= {name.replace("…", program) for program in ("vllm", "lmcache")} if "…" in name else {name}
    assert names
    assert {name for name in names if f"| `{name}` |" not in text} == set()
    (section,) = re.findall(r"<!-- findings -->\n(.*?)<!-- /findings -->", text, re.DOTALL)
    assert set(re.findall(r"^\| `([a-z0-9-]+)` \|", section, re.MULTILINE)) == names
