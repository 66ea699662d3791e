"""The races of tests/unit/worker/test_races.py on a GPU: real streams, slow kernels, real page-locked shared memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lmcache_mp_safe.ops.device import Device, Stream
from lmcache_mp_safe.testing.device_world import (
    Rig,
    Setter,
    copies_slower_than_the_engine,
    no_pins_and_no_watch,
    no_wait_for_the_fence,
    pages_bytes,
    slow_writes_before_the_fence,
)

pytestmark = pytest.mark.gpu

BLOCKS = 24
DELAY_S = 0.2
CLOCK_HZ = 2.0e9  # at least: a delay may be longer than it says


class CudaRig(Rig):
    """A delay is a kernel that spins for 200 ms."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.pages = torch.zeros(pages_bytes(BLOCKS), dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()

    def write(self, start: int, end: int, value: int) -> None:
        self.pages[start:end].fill_(value)

    def delay(self, stream: Stream) -> None:
        with torch.cuda.stream(stream.stream):  # type: ignore[attr-defined]
            torch.cuda._sleep(int(DELAY_S * CLOCK_HZ))

    def finish(self) -> None:
        torch.cuda.synchronize()


Race = Callable[[Rig, int], list[str]]


@pytest.mark.parametrize("race", [slow_writes_before_the_fence, copies_slower_than_the_engine])
def test_stored_pages_are_the_prompts_own(race: Race, device: Device) -> None:
    assert race(CudaRig(device), BLOCKS) == []


def test_stored_pages_are_the_prompts_own_on_another_stream_than_the_default(device: Device) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        assert slow_writes_before_the_fence(CudaRig(device), BLOCKS) == []


@pytest.mark.parametrize(
    ("mistake", "race"),
    [(no_wait_for_the_fence, slow_writes_before_the_fence), (no_pins_and_no_watch, copies_slower_than_the_engine)],
)
def test_race_is_seen_without_its_guard(
    mistake: Callable[[Setter], None], race: Race, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch.setattr)
    assert race(CudaRig(device), BLOCKS) != []
