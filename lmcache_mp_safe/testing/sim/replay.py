"""Runs a trace again."""

from __future__ import annotations

from lmcache_mp_safe.testing.sim.run import Outcome, run_commands
from lmcache_mp_safe.testing.sim.settings import Settings
from lmcache_mp_safe.testing.sim.trace import Trace, first_difference


def replay(recorded: Trace) -> tuple[Outcome, str | None]:
    """The outcome, and the first command that came out otherwise, if any.

    Raises:
        ValueError: the trace cannot be read.
    """
    outcome = run_commands(Settings.parse(recorded.world), [command for command, _ in recorded.entries])
    assert outcome.trace is not None
    return outcome, first_difference(recorded, outcome.trace)
