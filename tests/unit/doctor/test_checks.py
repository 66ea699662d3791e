"""Each configuration gets its finding, and its neighbour without the fault does not."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from lmcache_mp_safe.compat.versions import TESTED_LMCACHE, TESTED_VLLM
from lmcache_mp_safe.doctor.checks import diagnose
from lmcache_mp_safe.doctor.checks.server import missing_flags
from lmcache_mp_safe.doctor.facts import (
    Connector,
    ConnectorKind,
    Copies,
    Engine,
    Facts,
    Group,
    Host,
    Machine,
    Model,
    Pool,
    Probe,
    Server,
    ServerConfig,
    Software,
)
from lmcache_mp_safe.doctor.findings import ExitStatus, Finding, Level, exit_status, ok, problem, warning

HYBRID = Model(
    groups=(
        Group("MambaSpec", "recurrent", 640, 0, 3, 1 << 20),
        Group("FullAttentionSpec", "append-only", 640, 0, 1, 1 << 20),
    ),
    block_tokens=640,
    chunk_tokens=640,
    object_bytes=1 << 20,
    objects_per_chunk=4,
)
ATTENTION = Model((Group("FullAttentionSpec", "append-only", 16, 0, 4, 1 << 16),), 16, 256, 1 << 20, 1)

CONFIG = ServerConfig("0.5.6", "auto", "lmcache", False, True, 640, 1, 1 << 30, 0)

RIGHT = Facts(
    software=Software("0.1.0", "3.11", TESTED_VLLM[-1], "2.13.0", TESTED_LMCACHE[-1]),
    machine=Machine(8 << 30, 8 << 30, 0),
    probe=Probe(
        host=Host("0.32.0", "", "cpu", "", True, True, "vLLM asks"),
        engine=Engine(
            model="m",
            architecture="A",
            dtype="bfloat16",
            is_hybrid=True,
            prefix_caching=True,
            mamba_cache_mode="align",
            max_model_len=32768,
            tensor_ranks=1,
            pipeline_ranks=1,
            data_ranks=1,
            speculation="",
            draft_tokens=0,
            connector=Connector(ConnectorKind.OURS, "LMCacheMPSafeConnector", "kv_both", False, "fail"),
        ),
        model=HYBRID,
        copies=Copies("reference", "the KV cache is in CPU memory"),
    ),
    server=Server("tcp://h:1", "http://h:2", 640, Pool("p", 1 << 30), "", CONFIG, ""),
    arguments=("m",),
)

STOCK = Connector(ConnectorKind.STOCK, "LMCacheMPConnector", "kv_both", False, "recompute")


def changed(facts: Facts = RIGHT, **parts: Any) -> Facts:
    """The facts with fields of their parts replaced: `engine={"speculation": "mtp"}`; a part itself goes in whole."""
    replace = msgspec.structs.replace
    for name, change in parts.items():
        owner = facts.probe if name in ("host", "engine", "model", "copies") else facts
        part = replace(getattr(owner, name), **change) if isinstance(change, dict) else change
        owner = replace(owner, **{name: part})
        facts = replace(facts, probe=owner) if isinstance(owner, Probe) else owner
    return facts


def levels(facts: Facts) -> dict[str, Level]:
    """Level by name of every finding that is not ok."""
    found = [finding for findings in diagnose(facts).values() for finding in findings]
    return {finding.name: finding.level for finding in found if finding.level is not Level.OK}


def only(facts: Facts, name: str) -> Finding:
    found = [finding for findings in diagnose(facts).values() for finding in findings]
    assert levels(facts).keys() == {name}
    (finding,) = [finding for finding in found if finding.name == name and finding.level is not Level.OK]
    return finding


def test_right_configuration_has_no_warning_and_no_problem() -> None:
    assert levels(RIGHT) == {}
    assert levels(changed(engine={"is_hybrid": False, "speculation": "mtp", "draft_tokens": 2}, model=ATTENTION)) == {}


def test_groups_chunk_and_speculation_are_on_the_page() -> None:
    facts = changed(engine={"speculation": "mtp", "draft_tokens": 2, "drops_last_block": True})
    text = "\n".join(finding.text for finding in diagnose(facts)["model"])
    assert "KV group 0: recurrent (MambaSpec), 640 tokens a block, 3 layer(s)" in text
    assert "scheduler block 640 tokens, chunk 640 tokens, object 1.00 MiB" in text
    assert "hits end one block (640 tokens) earlier" in text


def test_room_counts_what_a_chunk_takes_with_its_states() -> None:
    """80 % of 1 GiB are 819 objects of 1 MiB: 204 chunks of 4 objects."""
    (room,) = [finding for finding in diagnose(RIGHT)["server"] if finding.name == "pool-tokens"]
    assert f"{204 * 640:,} tokens" in room.text


@pytest.mark.parametrize(
    ("parts", "name", "level", "words"),
    [
        ({"software": {"vllm": "0.99.0"}}, "vllm-untested", Level.WARNING, "tested with 0.26.0"),
        ({"software": {"lmcache": ""}}, "lmcache-missing", Level.PROBLEM, "not installed"),
        ({"host": {"device": ""}}, "no-device", Level.PROBLEM, "no device"),
        ({"host": {"gate_error": "odd shape"}}, "gate-does-not-fit", Level.PROBLEM, "odd shape"),
        ({"engine": {"prefix_caching": False}}, "prefix-caching-off", Level.PROBLEM, "prefix caching is off"),
        ({"engine": {"mamba_cache_mode": "none"}}, "mamba-cache-mode", Level.PROBLEM, "'none'"),
        ({"model": {"refusal": "no, since"}}, "refused", Level.PROBLEM, "no, since"),
        ({"engine": {"connector": Connector(ConnectorKind.NONE)}}, "no-connector", Level.WARNING, "no KV connector"),
        ({"engine": {"connector": Connector(ConnectorKind.OTHER, "Nixl")}}, "other-connector", Level.WARNING, "Nixl"),
        (
            {"engine": {"connector": Connector(ConnectorKind.OURS, "x", "kv_both", False, "fail", {}, "unknown key")}},
            "settings",
            Level.PROBLEM,
            "unknown key",
        ),
        ({"machine": {"shm_total": 64 << 20}}, "shm-small", Level.WARNING, "64 MiB"),
        ({"server": {"chunk_tokens": None}}, "server-absent", Level.PROBLEM, "no LMCache server answers at tcp://h:1"),
        ({"server": {"config": None, "config_error": "refused"}}, "server-http", Level.WARNING, "refused"),
        ({"server": None}, "server-unknown", Level.WARNING, "no single server"),
        ({"engine": {"data_ranks": 4}}, "server-workers", Level.WARNING, "4 engines wait for 1 worker"),
        ({"server": {"pool": Pool("p", 1 << 20)}}, "pool-too-small", Level.PROBLEM, "holds 0 tokens"),
        ({"server": {"pool": None, "refusal": "wrong /dev/shm"}}, "pool-unusable", Level.PROBLEM, "wrong /dev/shm"),
        ({"copies": Copies("", "", error="none fits")}, "no-backend", Level.PROBLEM, "none fits"),
        ({"copies": Copies("csrc", "w", "", False, "limit")}, "pinning-refused", Level.WARNING, "limit"),
    ],
)
def test_fault_has_its_finding_with_what_to_do(parts: dict[str, Any], name: str, level: Level, words: str) -> None:
    finding = only(changed(**parts), name)
    assert finding.level is level
    assert words in finding.text
    assert finding.remedy


def test_what_could_not_be_found_out_is_said_with_the_reason() -> None:
    probe = Probe(host=RIGHT.probe.host, failed_at="configuration", failure="no such model")
    assert "configuration: no such model" in only(changed(probe=probe), "not-found-out").text
    probe = msgspec.structs.replace(RIGHT.probe, model=None, failed_at="KV cache groups", failure="meta")
    assert "KV cache groups: meta" in only(changed(probe=probe), "not-found-out").text


def test_vllm_that_cannot_be_looked_at_is_a_problem() -> None:
    assert "it ended" in only(changed(probe=Probe(failed_at="vLLM", failure="it ended")), "vllm-broken").text


def test_child_of_multi_connector_must_be_given_the_policy() -> None:
    child = Connector(ConnectorKind.OURS, "LMCacheMPSafeConnector", "kv_both", True, "fail")
    assert levels(changed(engine={"connector": child})) == {
        "multi-connector": Level.WARNING,
        "load-failure-policy": Level.PROBLEM,
    }
    told = msgspec.structs.replace(child, load_failure_policy="recompute")
    assert levels(changed(engine={"connector": told})) == {"multi-connector": Level.WARNING}


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({"shm_name": ""}, ["--shm-name NAME"]),
        ({"lazy": True}, ["--no-l1-use-lazy"]),
        ({"transfer_mode": "lmcache_driven"}, ["--supported-transfer-mode auto"]),
        ({"transfer_mode": "engine_driven"}, []),
    ],
)
def test_exactly_the_missing_flags_of_the_server_are_named(changes: dict[str, Any], flags: list[str]) -> None:
    server = Server("u", "h", 640, None, "shares no memory", msgspec.structs.replace(CONFIG, **changes), "")
    assert missing_flags(server) == flags
    found = levels(changed(server=server))
    assert found["server-flags" if flags else "pool-unusable"] is Level.PROBLEM
    assert ("lazy-l1" in found) == ("--no-l1-use-lazy" in flags)


def test_all_three_flags_are_named_where_the_server_does_not_say() -> None:
    server = Server("u", "h", 640, None, "shares no memory", None, "closed")
    (finding,) = [f for f in diagnose(changed(server=server))["server"] if f.name == "server-flags"]
    assert "--shm-name NAME --no-l1-use-lazy --supported-transfer-mode auto" in finding.remedy


# --- the stock connector --------------------------------------------------------------------------------------------


def stock(**parts: Any) -> set[str]:
    """Names of what is found beyond the race that every hybrid model on the stock connector has."""
    engine = {"connector": STOCK, **parts.pop("engine", {})}
    host = {"device": "cuda", **parts.pop("host", {})}
    return set(levels(changed(engine=engine, host=host, **parts)))


RACE = {"stock-state-race"}


def test_stock_connector_on_attention_only_is_left_alone() -> None:
    assert stock(engine={"is_hybrid": False}, model=ATTENTION) == set()


def test_stock_connector_on_a_hybrid_is_a_race() -> None:
    assert stock() == RACE


@pytest.mark.parametrize(
    ("parts", "names"),
    [
        ({"engine": {"speculation": "mtp"}}, {"stock-speculation"}),
        ({"host": {"asks_capability": False}}, {"stock-divergent-hits"}),
        ({"host": {"device": "cpu"}}, {"stock-cpu-state"}),
        ({"host": {"reports_failed_loads": False}}, {"stock-load-failure-kills"}),
        (
            {"engine": {"connector": msgspec.structs.replace(STOCK, load_failure_policy="fail")}},
            {"stock-load-failure-policy"},
        ),
        (
            {"engine": {"connector": msgspec.structs.replace(STOCK, settings_error="remove autostart")}},
            {"stock-settings"},
        ),
        (
            {"server": {"config": msgspec.structs.replace(CONFIG, separate_object_groups=False)}},
            {"stock-object-groups"},
        ),
        ({"server": {"config": None}}, {"stock-object-groups-unknown", "server-http"}),
        ({"server": {"chunk_tokens": 256}}, {"stock-chunk-size"}),
        ({"server": {"chunk_tokens": 1280}}, {"stock-chunk-states"}),
        ({"copies": Copies("csrc", "w", "", True, "", "undefined symbol")}, {"stock-cuda-ops"}),
    ],
)
def test_public_report_about_the_stock_connector_is_recognised(parts: dict[str, Any], names: set[str]) -> None:
    assert stock(**parts) == RACE | names


def test_chunk_size_that_would_fit_the_stock_connector_is_named() -> None:
    facts = changed(engine={"connector": STOCK}, server={"chunk_tokens": 1000})
    (finding,) = [f for f in diagnose(facts)["stock connector"] if f.name == "stock-chunk-size"]
    assert "--chunk-size 1280" in finding.remedy


def test_configurations_of_the_stock_connector_are_no_findings_for_this_one() -> None:
    facts = changed(
        engine={"speculation": "mtp"},
        host={"asks_capability": False, "reports_failed_loads": False, "gate": ("X.y",)},
        server={"chunk_tokens": 256, "config": msgspec.structs.replace(CONFIG, separate_object_groups=False)},
        copies=Copies("csrc", "w", "", True, "", "undefined symbol"),
    )
    assert levels(facts) == {}


# --- status ---------------------------------------------------------------------------------------------------------


def test_exit_status_is_1_on_problems_and_on_warnings_if_strict() -> None:
    fine, doubtful, wrong = ok("a", ""), warning("b", "", "x"), problem("c", "", "x")
    assert exit_status([fine, doubtful], strict=False) is ExitStatus.OK
    assert exit_status([fine, doubtful], strict=True) is ExitStatus.PROBLEM
    assert exit_status([fine, wrong], strict=False) is ExitStatus.PROBLEM
    assert exit_status([fine], strict=True) is ExitStatus.OK


def test_command_itself_imports_neither_vllm_nor_lmcache_nor_torch() -> None:
    """They are slow, print, and may be what is broken."""
    code = "import sys, lmcache_mp_safe.cli.doctor; print({'vllm', 'lmcache', 'torch'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
