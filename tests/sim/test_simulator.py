"""A share of the seeds. `make sim` runs many; the share is fresh enough to notice what a change breaks."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from lmcache_mp_safe.testing.sim.replay import replay
from lmcache_mp_safe.testing.sim.run import run_commands, run_seed
from lmcache_mp_safe.testing.sim.settings import Settings, draw
from lmcache_mp_safe.testing.sim.trace import Trace, first_difference, read_trace
from lmcache_mp_safe.testing.sim.world import world

TRACES = sorted((Path(__file__).parent / "traces").glob("*.txt"))
SEEDS = range(10)
STEPS = 40


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_wrong_hangs_or_is_left_over_in_a_world_with_faults(seed: int) -> None:
    outcome = run_seed(seed, STEPS)
    assert (outcome.violation, outcome.text) == ("", "")


def test_simulated_engine_is_right_without_a_connector() -> None:
    """What fails here is the simulator's own fault."""
    for seed in range(100, 103):
        outcome = run_seed(seed, STEPS, msgspec.structs.replace(draw(seed), connector=False, tidy=True))
        assert (outcome.violation, outcome.text) == ("", "")


def test_share_of_the_seeds_stores_loads_and_has_faults() -> None:
    """A simulator in which nothing happens finds nothing."""
    settings = Settings(1, shape="hybrid", pin_fraction=1.0, pace=0.9)
    commands = ["arrive a prompt=1:60 max=2", *["step"] * 40, "fault forget", "arrive b prompt=1:60 max=2", "drain"]
    outcome = run_commands(settings, commands)
    assert outcome.violation == ""
    assert outcome.counts["objects_stored"] > 0
    assert outcome.counts["hits"] == 1


def test_server_that_died_comes_back_as_another_one() -> None:
    """With what it held, locks and lookups of its last moments would be ours to release."""
    with world(Settings(1)) as made:
        for command in ("arrive a prompt=1:60 max=2", *["step"] * 20, "fault die", "calm"):
            made.do(command)
        assert not made.network.dead
        assert not made.network.server.objects.readable
        made.do("drain")


def test_same_seed_is_the_same_run() -> None:
    one, two = run_seed(3, 40), run_seed(3, 40)
    assert one.trace is not None
    assert two.trace is not None
    assert one.trace.text() == two.trace.text()


def test_trace_is_read_as_it_was_written_and_replays_the_same() -> None:
    outcome = run_seed(5, 30)
    assert outcome.trace is not None
    recorded = read_trace(outcome.trace.text())
    again, difference = replay(recorded)
    assert difference is None
    assert again.violation == outcome.violation


def test_replay_names_the_first_command_that_came_out_otherwise() -> None:
    recorded = Trace("", [("step", ""), ("fault flip", "byte 3")])
    replayed = Trace("", [("step", ""), ("fault flip", "byte 4")])
    assert first_difference(recorded, recorded) is None
    assert first_difference(recorded, replayed) == "command 2, 'fault flip': recorded 'byte 3', now 'byte 4'"


@pytest.mark.parametrize("text", ["", "step", "world seed=1\n  out of nothing", "world seed=1 shape=round\nstep"])
def test_what_is_no_trace_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"world|command|settings"):
        replay(read_trace(text))


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_trace_ends_well(path: Path) -> None:
    outcome, _ = replay(read_trace(path.read_text()))
    assert (outcome.violation, outcome.text) == ("", "")
