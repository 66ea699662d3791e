"""The races of tests/unit/worker/test_races.py on a GPU: real streams, slow kernels, real page-locked shared memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from lmcache_mp_safe.ops.device import Device, Stream
from lmcache_mp_safe.ops.streamed import StreamedBackend, StreamFence
from lmcache_mp_safe.scheduler.certify import Pins
from lmcache_mp_safe.testing.device_world import (
    Rig,
    copies_slower_than_the_engine,
    pages_bytes,
    slow_writes_before_the_fence,
)
from lmcache_mp_safe.testing.world import FakePool
from lmcache_mp_safe.worker.half import WorkerHalf

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


def no_wait_for_the_fence(patch: pytest.MonkeyPatch) -> None:
    """The fence is recorded on a stream that has nothing to do."""
    patch.setattr(StreamedBackend, "record_fence", lambda self: StreamFence(self._device.side_stream().record()))


def no_pins_and_no_watch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(FakePool, "pin", lambda self, blocks: None)
    patch.setattr(Pins, "unpin", lambda self, certificate: setattr(self, "held", self.held - len(certificate.blocks)))
    patch.setattr(WorkerHalf, "_hold_compute", lambda self, running: None)


@pytest.mark.parametrize(
    ("mistake", "race"),
    [(no_wait_for_the_fence, slow_writes_before_the_fence), (no_pins_and_no_watch, copies_slower_than_the_engine)],
)
def test_race_is_seen_without_its_guard(
    mistake: Callable[[pytest.MonkeyPatch], None], race: Race, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    assert race(CudaRig(device), BLOCKS) != []
