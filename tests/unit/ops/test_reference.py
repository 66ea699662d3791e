"""The readable backend: bytes, checksums, bounds, and the choice of a backend."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from lmcache_mp_safe.contract import SKIP
from lmcache_mp_safe.errors import ConfigError, LocalError
from lmcache_mp_safe.geometry.checksum import PayloadChecksum
from lmcache_mp_safe.geometry.spans import Span, Spans
from lmcache_mp_safe.ops import Backend, choose_backend
from lmcache_mp_safe.ops.contract import Bytes
from lmcache_mp_safe.ops.reference import InlineFence, ReferenceBackend


class UnpassedFence:
    def passed(self) -> bool:
        return False


class UnrecordedFence:
    def passed(self) -> bool:
        raise LocalError("the fence was never recorded")


FENCE = InlineFence()


def memory(size: int = 64) -> Bytes:
    return np.arange(size, dtype=np.uint8)


def backend(*buffers: Bytes) -> Backend:
    return ReferenceBackend(buffers, why="test")


def checksum(data: bytes) -> int:
    state = PayloadChecksum()
    state.update(np.frombuffer(data, np.uint8))
    return state.intdigest()


def test_checksums_are_of_each_piece_in_payload_order() -> None:
    slots = [np.zeros(8, np.uint8), np.zeros(8, np.uint8)]
    spans = Spans.of([Span(1, 10, 0, 0, 4), Span(0, 20, 0, 4, 4), Span(0, 3, 1, 0, 2)])
    completion = backend(memory(), memory() + 100).copy_out(spans, slots, FENCE)
    assert completion.done()
    assert slots[0].tolist() == [110, 111, 112, 113, 20, 21, 22, 23]
    assert completion.checksums == (checksum(slots[0].tobytes()), checksum(bytes([3, 4])))


def test_piece_that_is_not_wanted_is_not_written() -> None:
    slot = np.zeros(4, np.uint8)
    backend(memory()).copy_out(Spans.of([Span(0, 1, 0, 0, 4), Span(0, 9, 1, 0, 4)]), [None, slot], FENCE)
    assert slot.tolist() == [9, 10, 11, 12]


def test_page_that_is_not_wanted_counts_for_the_checksum_and_is_not_written() -> None:
    pages, slot = memory(), np.full(6, 7, np.uint8)
    completion = backend(pages).copy_in(
        Spans.of([Span(0, SKIP, 0, 0, 2), Span(0, 30, 0, 2, 4)]), [slot], FENCE, checked=True
    )
    assert completion.checksums == (checksum(slot.tobytes()),)
    assert np.flatnonzero(pages != memory()).tolist() == [30, 31, 32, 33]


class OtherWriter(np.ndarray[Any, np.dtype[np.uint8]]):
    """A slot that another writer changes as soon as it was written. Slices of it are of this class, too."""

    def __setitem__(self, where: Any, value: Any) -> None:
        super().__setitem__(where, value)
        super().__setitem__(0, 255)


def test_checksum_of_a_copy_out_is_that_of_the_pages_and_not_of_what_another_writer_put_into_the_slot() -> None:
    pages, plain = memory(), np.zeros(4, np.uint8)
    slot = plain.view(OtherWriter)

    completion = backend(pages).copy_out(Spans.of([Span(0, 8, 0, 0, 4)]), [slot], FENCE)
    assert plain[0] == 255
    assert completion.checksums == (checksum(bytes([8, 9, 10, 11])),)


@pytest.mark.parametrize("fence", [UnpassedFence(), UnrecordedFence()])
def test_inline_copy_needs_a_fence_that_has_passed(fence: UnpassedFence) -> None:
    slot = np.zeros(4, np.uint8)
    with pytest.raises(LocalError, match="fence"):
        backend(memory()).copy_out(Spans.of([Span(0, 8, 0, 0, 4)]), [slot], fence)
    with pytest.raises(LocalError, match="fence"):
        backend(memory()).copy_in(Spans.of([Span(0, 8, 0, 0, 4)]), [slot], fence, checked=True)
    assert not slot.any()


@pytest.mark.parametrize("bad", [Span(0, 62, 0, 4, 4), Span(0, -3, 0, 4, 2), Span(0, 0, 0, 6, 4)])
def test_span_outside_of_its_memory_is_found_before_the_first_byte_is_written(bad: Span) -> None:
    pages, slot = memory(), np.zeros(8, np.uint8)
    good = Span(0, 8, 0, 0, 4)
    with pytest.raises(LocalError, match="outside"):
        backend(pages).copy_out(Spans.of([good, bad]), [slot], FENCE)
    with pytest.raises(LocalError, match="outside"):
        backend(pages).copy_in(Spans.of([good, bad]), [slot], FENCE, checked=True)
    assert not slot.any()
    assert np.array_equal(pages, memory())


@pytest.mark.parametrize("wanted", ["auto", "reference"])
def test_cpu_caches_get_the_reference_over_their_own_memory(wanted: str) -> None:
    buffer = torch.arange(16, dtype=torch.uint8)
    chosen = choose_backend([buffer], wanted)
    assert (chosen.name, chosen.why) == ("reference", "the KV cache is in CPU memory")
    chosen.copy_in(Spans.of([Span(0, 4, 0, 0, 2)]), [np.full(2, 99, np.uint8)], FENCE, checked=True)
    assert buffer[3:7].tolist() == [3, 99, 99, 6]


@pytest.mark.parametrize(
    ("device", "wanted", "message"),
    [
        ("xpu", "auto", "xpu, which is not supported"),
        ("xpu", "reference", "xpu, which is not supported"),
        ("cuda", "reference", "'reference' copies in CPU memory only"),
        ("cpu", "csrc", "'csrc' copies on a GPU"),
        ("cpu", "cupy", "'cupy' copies on a GPU"),
    ],
)
def test_backend_that_does_not_fit_the_device_is_a_clear_error(device: str, wanted: str, message: str) -> None:
    class Elsewhere:
        """What the choice looks at, without needing the device."""

        def __init__(self) -> None:
            self.device = torch.device(device)

    with pytest.raises(ConfigError, match=message):
        choose_backend([Elsewhere()], wanted)


def test_backend_that_does_not_exist_is_an_error_that_names_the_key() -> None:
    with pytest.raises(ConfigError, match=r"lmcache\.mp\.safe\.backend 'fast'"):
        choose_backend([torch.zeros(4, dtype=torch.uint8)], "fast")
