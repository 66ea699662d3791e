"""Races between an engine's writes and the copies, on a device in small; tests/gpu/test_races.py has them on a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest
import torch

from lmcache_mp_safe.ops.device import Stream
from lmcache_mp_safe.testing.device_world import (
    Rig,
    Setter,
    copies_slower_than_the_engine,
    no_pins,
    no_pins_and_no_watch,
    no_wait_for_the_fence,
    pages_bytes,
    slow_writes_before_the_fence,
)
from lmcache_mp_safe.testing.sim_device import SimDevice, SimEvent, SimStream

BLOCKS = 24


class SimRig(Rig):
    """Delayed streams stand still until `finish`; the others run whenever something is submitted."""

    def __init__(self) -> None:
        self.device = SimDevice(eager=True)
        self.pages = torch.zeros(pages_bytes(BLOCKS), dtype=torch.uint8)
        self._delays: deque[SimEvent] = deque()

    def write(self, start: int, end: int, value: int) -> None:
        self.device.compute.submit(lambda: self.pages[start:end].fill_(value))

    def delay(self, stream: Stream) -> None:
        assert isinstance(stream, SimStream)
        self._delays.append(SimEvent(reached=False))
        stream.wait(self._delays[-1])

    def finish(self) -> None:
        while self._delays:
            self._delays.popleft().mark.reach()
            self.device.run()
        self.device.run()


Race = Callable[[Rig, int], list[str]]


@pytest.mark.parametrize("race", [slow_writes_before_the_fence, copies_slower_than_the_engine])
def test_stored_pages_are_the_prompts_own(race: Race) -> None:
    assert race(SimRig(), BLOCKS) == []


@pytest.mark.parametrize(
    ("mistake", "race"),
    [
        (no_wait_for_the_fence, slow_writes_before_the_fence),
        (no_pins_and_no_watch, copies_slower_than_the_engine),
    ],
)
def test_race_is_seen_without_its_guard(
    mistake: Callable[[Setter], None], race: Race, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch.setattr)
    assert race(SimRig(), BLOCKS) != []


def test_second_guard_holds_the_forward_where_pins_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that is handed out again loses its hash, and then the forward waits for the copy."""
    no_pins(monkeypatch.setattr)
    assert copies_slower_than_the_engine(SimRig(), BLOCKS) == []
