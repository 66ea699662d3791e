"""`verify` as a user runs it: a command against two real `vllm serve`, of which one has the connector.

One of the servers can be made to load wrong states while it runs, by a vLLM plugin of the test's own.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lmcache_mp_safe.testing.browser import Browser, missing
from lmcache_mp_safe.testing.engine import EngineSpec
from lmcache_mp_safe.testing.serve import ServeProcess
from lmcache_mp_safe.verify.judge import LEAST_CONTROLS

pytestmark = pytest.mark.engine

MakeSpec = Callable[..., EngineSpec]

BLOCK = 640  # of the hybrid model: the least that can be hit
# A word is about seven tokens of the tiny tokenizer: the system prompt spans one block, the longest prompt three.
SMALL = ["--requests", str(LEAST_CONTROLS), "--words", "350", "--max-tokens", "8"]

# Copies the state of each recurrent layer into the place of another one's, while the file is there. Bytes, seals and
# checksums are all as they should be.
PLUGIN = """
from pathlib import Path

from msgspec.structs import replace


def rotated(copy):
    groups = [group for group, blocks in enumerate(copy.blocks) if blocks]
    moved = dict(zip(groups, groups[1:] + groups[:1]))
    return replace(copy, blocks=tuple(copy.blocks[moved.get(group, group)] for group in range(len(copy.blocks))))


def register():
    from lmcache_mp_safe.worker.half import WorkerHalf

    begin_step = WorkerHalf.begin_step

    def wrong_state(self, plan):
        if Path({switch!r}).exists():
            loads = [replace(load, objects=tuple(map(rotated, load.objects))) for load in plan.loads]
            plan = replace(plan, loads=tuple(loads))
        begin_step(self, plan)

    if begin_step.__name__ != "wrong_state":  # vLLM may call this twice in a process
        WorkerHalf.begin_step = wrong_state
"""


def install_plugin(path: Path, switch: Path) -> None:
    """As pip would: a module, and the entry point that vLLM looks for."""
    (path / "wrong_state.py").write_text(PLUGIN.format(switch=str(switch)))
    facts = path / "wrong_state-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong-state\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[vllm.general_plugins]\nwrong_state = wrong_state:register\n")


@dataclass(frozen=True)
class Pair:
    """Two servers with the same model. While the file `switch` is there, the one with the connector loads wrongly."""

    tested: str
    baseline: str
    switch: Path


@pytest.fixture(scope="module")
def pair(make_spec: MakeSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    path = tmp_path_factory.mktemp("plugin")
    install_plugin(path, path / "switch")
    # Steps that could end at any multiple of 128 tokens, were it not for the connector (see test_block_size.py): the
    # server without one has to be told the block size.
    spec = make_spec(max_num_batched_tokens=1000)
    without = dataclasses.replace(spec, connector=None, connector_extra={}, block_size=BLOCK)
    flags = ["--enable-prompt-tokens-details"]
    plugin = {"PYTHONPATH": str(path)}
    tested = ServeProcess(spec, flags=flags, dev_mode=True, environment=plugin, start_timeout_s=300)
    baseline = ServeProcess(without, flags=flags, start_timeout_s=300)
    try:
        tested.launch()
        baseline.launch()
        tested.wait()
        baseline.wait()
        yield Pair(tested.url, baseline.url, path / "switch")
    finally:
        tested.stop()
        baseline.stop()


@pytest.fixture
def wrong_states(pair: Pair) -> Iterator[None]:
    pair.switch.touch()
    yield
    pair.switch.unlink()


def verify(tmp_path: Path, *arguments: str) -> tuple[int, str, dict[str, Any]]:
    """Exit status, what was printed, and the JSON that was written."""
    written = tmp_path / "verify.json"
    command = [sys.executable, "-m", "lmcache_mp_safe.cli.main", "verify", *arguments, "--json", str(written)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    said = ended.stdout + ended.stderr
    return ended.returncode, said, json.loads(written.read_text()) if written.exists() else {}


def answers(found: dict[str, Any], *passes: str) -> list[dict[str, Any]]:
    return [answer for answer in found["answers"] if answer["pass"] in passes]


@pytest.mark.parametrize(
    "concurrency", [pytest.param("1", marks=pytest.mark.long), "2", pytest.param("4", marks=pytest.mark.long)]
)
def test_connector_is_clean_and_its_hits_are_bit_for_bit_the_baselines_answers(
    pair: Pair, tmp_path: Path, concurrency: str
) -> None:
    """Whatever requests share a step: every sum of this model comes out the same."""
    addresses = ["--url", pair.tested, "--baseline-url", pair.baseline]
    status, said, found = verify(tmp_path, *addresses, *SMALL, "--concurrency", concurrency)
    assert (status, found["verdict"], found["notes"]) == (0, "clean", []), said
    again = answers(found, "again")
    # Its cache was emptied before each: every cached token of the last pass was loaded.
    assert min(answer["cached_tokens"] for answer in again) >= BLOCK
    assert found["external_tokens"] >= sum(answer["cached_tokens"] for answer in again)
    assert any(answer["cached_tokens"] for answer in answers(found, "control")), "vLLM's own hits are in the control"
    assert {answer["kind"] for answer in found["answers"]} == {"same"}
    assert {answer["drift_nats"] for answer in found["answers"]} == {0.0}


@pytest.mark.usefixtures("wrong_states")
def test_states_that_are_loaded_wrongly_are_reported_as_corruption(pair: Pair, tmp_path: Path) -> None:
    html = tmp_path / "verify.html"
    addresses = ["--url", pair.tested, "--baseline-url", pair.baseline]
    status, said, found = verify(tmp_path, *addresses, *SMALL, "--concurrency", "2", "--html", str(html))
    assert (status, found["verdict"]) == (1, "corrupt"), said
    assert "corrupt:" in said
    assert {answer["kind"] for answer in answers(found, "baseline", "control")} <= {"same", "near-tie"}
    assert len([answer for answer in answers(found, "again") if answer["kind"] == "far"]) >= LEAST_CONTROLS // 4
    if missing():
        pytest.skip(f"reported and right; the page was not looked at, no headless browser: {missing()}")
    with Browser() as browser:
        browser.open(html)
        assert browser.complaints() == []
        assert browser.run("return document.querySelector('.verdict b').innerText") == "corrupt"
        assert browser.run("return document.querySelectorAll('circle.far').length") > 0


@pytest.mark.long
def test_server_that_is_its_own_baseline_is_clean(pair: Pair, tmp_path: Path) -> None:
    status, said, found = verify(tmp_path, "--url", pair.tested, *SMALL, "--concurrency", "2")
    assert (status, found["verdict"]) == (0, "clean"), said
    assert found["external_tokens"] > 0
    assert {answer["cached_tokens"] for answer in answers(found, "baseline", "control")} <= {0, None}


@pytest.mark.long
@pytest.mark.usefixtures("wrong_states")
def test_wrong_states_are_corruption_where_the_server_is_its_own_baseline(pair: Pair, tmp_path: Path) -> None:
    status, said, found = verify(tmp_path, "--url", pair.tested, *SMALL, "--concurrency", "2")
    assert (status, found["verdict"]) == (1, "corrupt"), said


def test_what_the_servers_lack_is_said(pair: Pair, tmp_path: Path) -> None:
    """The baseline as the server under test: no connector, and no route to empty its cache."""
    few = ["--requests", "2", *SMALL[2:]]
    status, said, found = verify(tmp_path, "--url", pair.baseline, *few)
    assert (status, found["verdict"], found["external_tokens"]) == (3, "undecided", 0), said
    assert "VLLM_SERVER_DEV_MODE=1" in said
    assert "No token came from the connector" in said
    status, said, _ = verify(tmp_path, "--url", pair.tested, "--model", "another")
    assert status == 2
    assert "does not serve 'another' but: tiny" in said
    status, said, _ = verify(tmp_path, "--url", pair.tested, "--words", "9000", *few[:2])
    assert status == 2
    assert "maximum context length" in said
