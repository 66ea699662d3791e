"""`doctor` before real servers: what they lend, what they lack, and that looking leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from lmcache_mp_safe.doctor.checks import server as server_check
from lmcache_mp_safe.doctor.facts import Facts, Machine, Probe, Server, Software
from lmcache_mp_safe.doctor.findings import Finding, Level
from lmcache_mp_safe.doctor.gather import Options, look_at_server
from lmcache_mp_safe.testing.server import LMCacheServer

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

# A server that is there answers soon; these are for a machine that does much else.
START_S, STEP_S = 240.0, 20.0


def findings(server: Server) -> dict[str, Finding]:
    facts = Facts(
        Software("0.1.0", "3.11", "0.32.0", "2.13.0", "0.5.6"), Machine(8 << 30, 8 << 30, 0), Probe(), server, ()
    )
    return {finding.name: finding for finding in server_check.check(facts)}


def looked_at(running: LMCacheServer) -> Server:
    return look_at_server(running.url, Options(http_url=running.http_url, step_s=STEP_S))


@pytest.fixture(scope="module")
def right() -> Iterator[LMCacheServer]:
    with LMCacheServer(l1_size_gb=0.25, start_timeout_s=START_S) as running:
        yield running


@pytest.fixture(scope="module")
def other() -> Iterator[LMCacheServer]:
    with LMCacheServer(l1_size_gb=0.1, start_timeout_s=START_S) as running:
        yield running


def status(running: LMCacheServer) -> Any:
    with urllib.request.urlopen(f"{running.http_url}/status", timeout=10) as answer:
        return json.loads(answer.read())


def test_right_server_is_seen_with_pool_version_and_room_and_nothing_is_left_on_it(right: LMCacheServer) -> None:
    server, left = looked_at(right), status(right)
    found = findings(server)
    assert {name for name, finding in found.items() if finding.level is not Level.OK} == set()
    assert server.pool is not None
    assert server.pool.name.endswith(right.shm_name)
    assert server.pool.size == 256 << 20
    assert "pool of 256 MiB, 256 MiB of them free" in found["pool-room"].text
    assert "LMCache 0.5.6, chunk size 256 tokens" in found["server-version"].text
    assert left["worker_liveness"]["tracked_instances"] == 0
    assert left["registered_non_cuda_instance_ids"] == []
    assert left["storage_manager"]["l1_manager"]["read_locked_count"] == 0
    assert left["active_sessions"] == 0


@pytest.mark.parametrize(
    ("shm_name", "flags", "missing"),
    [
        ("", ("--no-l1-use-lazy", "--supported-transfer-mode", "auto"), "start it with --shm-name NAME"),
        (None, ("--no-l1-use-lazy",), "start it with --supported-transfer-mode auto"),
        pytest.param("", (), "start it with --shm-name NAME --supported-transfer-mode auto", marks=pytest.mark.long),
    ],
    ids=["no shared memory", "no engine-driven transfer", "LMCache's defaults"],
)
def test_server_that_lends_no_memory_is_told_exactly_the_flags_that_it_lacks(
    shm_name: str | None, flags: tuple[str, ...], missing: str
) -> None:
    """Lazy L1 is LMCache's default on a GPU only: a server without one switches it off by itself."""
    with LMCacheServer(l1_size_gb=0.1, shm_name=shm_name, flags=flags, start_timeout_s=START_S) as running:
        found = findings(looked_at(running))
    assert found["server-flags"].level is Level.PROBLEM
    assert found["server-flags"].remedy == missing


def test_without_the_http_interface_the_pool_is_proven_all_the_same(right: LMCacheServer) -> None:
    found = findings(look_at_server(right.url, Options(http_url="http://127.0.0.1:9", step_s=STEP_S)))
    assert found["server-http"].level is Level.WARNING
    assert found["pool"].level is Level.OK
    assert "pool-room" not in found


def test_http_interface_of_another_server_is_not_believed(right: LMCacheServer, other: LMCacheServer) -> None:
    server = look_at_server(right.url, Options(http_url=other.http_url, step_s=STEP_S))
    assert server.config is None
    assert "it is another one" in server.config_error


def test_absent_server_is_a_problem_with_the_command_that_starts_one() -> None:
    found = findings(look_at_server("tcp://127.0.0.1:9", Options(step_s=1)))
    assert found["server-absent"].level is Level.PROBLEM
    assert "--shm-name lmcache --no-l1-use-lazy --supported-transfer-mode auto" in found["server-absent"].remedy


def test_frozen_server_is_an_absent_one_within_the_deadline(other: LMCacheServer) -> None:
    other.pause()
    try:
        server = look_at_server(other.url, Options(http_url=other.http_url, step_s=2))
    finally:
        other.resume()
    assert server.chunk_tokens is None


def test_address_that_is_none_is_said_to_be_none() -> None:
    found = findings(look_at_server("nonsense://x:1", Options(step_s=1)))
    assert "nonsense" in found["server-absent"].text


def test_command_prints_json_and_ends_with_1_on_a_problem() -> None:
    """Without a model, and with nothing behind the address."""
    command = ["-m", "lmcache_mp_safe.cli.main", "doctor", "--server-url", "tcp://127.0.0.1:9", "--step", "1", "--json"]
    run = subprocess.run([sys.executable, *command, "-"], capture_output=True, text=True, timeout=280, check=False)
    assert run.returncode == 1, run.stderr
    result = json.loads(run.stdout)
    assert result["counts"]["problem"] == 1
    assert {finding["name"] for finding in result["sections"]["server"]} >= {"server-absent"}
    assert result["facts"]["probe"]["host"]["device"] == "cpu"
