"""The cases that need no GPU, once each at tiny size, and that what they compare is the same work."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import zmq
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory
from typer.testing import CliRunner

from lmcache_mp_safe.bench.cases import CASES
from lmcache_mp_safe.bench.engine_loop import prompt
from lmcache_mp_safe.bench.runner import Case, Row, WrongBytesError, run_case
from lmcache_mp_safe.bench.scheduler_hooks import Life, lives, row
from lmcache_mp_safe.bench.shapes import ATTENTION, HYBRID, Shape
from lmcache_mp_safe.bench.stub import StubServer
from lmcache_mp_safe.bench.ttft import LENGTHS
from lmcache_mp_safe.bench.wire_bytes import traffic
from lmcache_mp_safe.cli.main import app
from lmcache_mp_safe.errors import LocalError
from lmcache_mp_safe.wire.keys import object_key
from lmcache_mp_safe.wire.tokens import synthetic_tokens

IN_SECONDS = [case for case in CASES if case.key != "ttft-cpu"]
PLOTTED = {"scheduler-hooks", "wire-bytes"}


@pytest.mark.parametrize("case", IN_SECONDS, ids=lambda case: case.key)
def test_a_case_runs_at_tiny_size_and_leaves_its_files(case: Case, tmp_path: Path) -> None:
    result = run_case(case, tmp_path, quick=True, header={})
    assert (result.outcome, result.reason) == ("done", "")
    assert result.rows
    assert not result.missed, "thresholds are for whole sizes"
    written = {path.suffix for path in tmp_path.iterdir()}
    assert written == {".json", ".md"} | ({".svg"} if case.key in PLOTTED else set())


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_a_hit_on_the_cpu_engine_is_timed() -> None:
    (case,) = (case for case in CASES if case.key == "ttft-cpu")
    result = run_case(case, None, quick=True, header={})
    assert (result.outcome, result.reason) == ("done", "")
    (only,) = result.rows
    length, block = LENGTHS[0], 640
    assert only.values["hit tokens"] == (length - 1) // block * block


@pytest.mark.parametrize("shape", [HYBRID, ATTENTION], ids=lambda shape: shape.name)
@pytest.mark.parametrize("side", ["ours", "stock"])
def test_both_connectors_store_all_of_a_prompt_and_find_it_again(shape: Shape, side: str) -> None:
    length = 3 * 1616 + 200
    found = traffic(shape, side, length, ranks=2, decode_steps=12)
    calls, sent, hit_tokens = found["hit"]
    assert hit_tokens >= length - shape.stock_chunk - shape.block_tokens
    assert found["cold"][2] == 0
    assert min(calls, sent, found["cold"][0], found["cold"][1]) > 0


def test_a_connector_that_stores_nothing_gets_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_mp_safe.bench.connectors._EXTRA", {"lmcache.mp.safe.pin_fraction": 1e-9})
    monkeypatch.setattr("lmcache_mp_safe.scheduler.stores.Stores.consider", lambda *_: None)
    with pytest.raises(WrongBytesError, match="a hit of 0 tokens"):
        traffic(ATTENTION, "ours", 2000, ranks=1, decode_steps=4)


@pytest.mark.parametrize("delay", [1, 3])
def test_time_is_taken_in_every_phase_on_both_sides(delay: int) -> None:
    found = lives(HYBRID, 2, 4000, delay)
    assert set(found) == {"ours", "stock"}
    for life in found.values():
        assert all(value > 0 for value in dataclasses.astuple(life))


def test_lives_with_calls_that_failed_give_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise LocalError("a bug")

    monkeypatch.setattr("lmcache_mp_safe.scheduler.stores.Stores.consider", refuse)
    with pytest.raises(RuntimeError, match="internal_errors"):
        lives(HYBRID, 1, 4000, 1)


def test_a_row_holds_medians_and_the_large_cell_has_thresholds() -> None:
    slow, fast = Life(10, 20, 30, 40, 50), Life(1, 2, 3, 4, 20)
    found = [{"ours": fast, "stock": slow}, {"ours": slow, "stock": slow}, {"ours": fast, "stock": slow}]
    held = row("name", found, held_to_it=True)
    assert (held.values["decode us"], held.values["decode, stock us"]) == (3, 30)
    assert {check.what: check.passed for check in held.checks} == {
        "decode, of stock's": True,
        "life, of stock's": False,
    }
    assert not row("name", found, held_to_it=False).checks


def test_bytes_are_counted_as_lmcaches_own_client_sends_them() -> None:
    key = object_key("name", "session", "salt", synthetic_tokens([bytes([n]) * 32 for n in range(9)], 256), 0, 9 * 256)
    plain = dataclasses.replace(key, token_ids=tuple(prompt(3000, 1)))
    server = StubServer(notes=True)
    stub = server.client()
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind("inproc://counted")
    client = RequestClientFactory.create("inproc://counted", context=context)
    try:
        for one in (client, stub):
            one.lookup(key, 1)
            one.store(plain, 7, [[1, 2, 3], [0, 4000]], bytes(64))
            one.end_session("session")
            one.commit_store(key, 7, b"")
        for call in server.calls:
            assert router.poll(5000), "no message"
            _, number, *parts = router.recv_multipart()
            assert call.sent_bytes - 3 == sum(map(len, parts)), "3: the number of a call, 1000"
            assert len(number) == 1
    finally:
        client.close()
        router.close(linger=0)
        context.term()


def test_the_stub_server_answers_when_it_works_and_finds_what_was_stored() -> None:
    server = StubServer(keeps=True, delay=2)
    client = server.client()
    key = object_key("name", "a", "", tuple(prompt(1024, 1)), 0, 1024)
    future = client.store(dataclasses.replace(key, end=768), 7, [[1]], b"")
    assert not future.query()
    server.work()
    assert not future.query()
    server.work()
    assert future.result() == (b"", True)
    client.lookup(key, 1)
    status = client.query_prefetch_status("a")
    for _ in range(2):
        server.work()
    assert status.result() == 3


# --- the command ------------------------------------------------------------------------------------------------------


class Fine:
    key, description = "fine", "Measures nothing."

    def can_run(self) -> str | None:
        return None

    def run(self, quick: bool) -> list[Row]:
        return [Row("a row", {"us": 1.0})]


class Failing(Fine):
    key = "failing"

    def run(self, quick: bool) -> list[Row]:
        raise WrongBytesError("wrong")


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_mp_safe.cli.bench.CASES", (Fine(), Failing()))


@pytest.mark.usefixtures("few")
def test_the_command_writes_json_and_its_exit_status_tells_a_failure(tmp_path: Path) -> None:
    file = tmp_path / "all.json"
    assert CliRunner().invoke(app, ["bench", "fine", "--json", str(file)]).exit_code == 0
    (only,) = json.loads(file.read_text())
    assert (only["key"], only["outcome"], only["rows"][0]["values"]) == ("fine", "done", {"us": 1.0})
    assert CliRunner().invoke(app, ["bench", "--json", str(file)]).exit_code == 1
    assert [entry["outcome"] for entry in json.loads(file.read_text())] == ["done", "failed"]


@pytest.mark.usefixtures("few")
def test_the_command_lists_cases_and_refuses_one_that_there_is_not() -> None:
    assert "Measures nothing." in CliRunner().invoke(app, ["bench", "--list"]).output
    assert CliRunner().invoke(app, ["bench", "nothing"]).exit_code == 2
