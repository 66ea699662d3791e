"""Devices on a GPU: what they move and digest, byte for byte, and what they say when they cannot."""

from __future__ import annotations

import functools
import mmap
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lmcache_mp_safe.geometry.checksum import PayloadChecksum, combine, tile_count
from lmcache_mp_safe.ops.cupy_device import CupyDevice
from lmcache_mp_safe.ops.device import Bytes, Copy, DeviceError, Digest, Move, Record, Stream, Wait, Words
from lmcache_mp_safe.ops.native import NativeDevice
from lmcache_mp_safe.ops.torch_device import TorchDevice, TorchStream, event_handle

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
    pytest.mark.filterwarnings("default"),  # cupy and torch warn of what is none of our business
]

POISON = 0xA5
LENGTHS = [1, 15, 16, 17, 1023, 1024, 1025, 16383, 16384, 16385, 100_000, (3 << 20) + 5]

DEVICES: dict[str, Callable[..., TorchDevice]] = {
    "csrc": NativeDevice,
    "csrc-loop": functools.partial(NativeDevice, force_loop=True),
    "cupy": CupyDevice,
}


@pytest.fixture(scope="module", params=sorted(DEVICES))
def device(request: pytest.FixtureRequest) -> TorchDevice:
    if request.param == "cupy":
        pytest.importorskip("cupy", exc_type=ImportError)
    return DEVICES[request.param]("cuda:0", why="test")


@pytest.fixture
def stream(device: TorchDevice) -> Stream:
    device.enter()
    return device.side_stream()


def uploaded(array: Any) -> Any:
    """A copy on the device, ready for every stream."""
    tensor = torch.from_numpy(array.view(np.uint8).reshape(-1).copy()).to("cuda:0")
    torch.cuda.synchronize()
    return tensor


def downloaded(tensor: Any) -> Bytes:
    torch.cuda.synchronize()
    return tensor.cpu().numpy()


def random_bytes(random: np.random.Generator, size: int) -> Bytes:
    return random.integers(0, 256, size, np.uint8)


# --- move ---


def move_is_exact(device: TorchDevice, stream: Stream, rows: list[tuple[int, int, int]]) -> None:
    """Rows: offset in the source, offset in the target, bytes. Compares the whole target."""
    source = random_bytes(np.random.default_rng(len(rows)), max(row[0] + row[2] for row in rows) + 64)
    expected = np.full(max(row[1] + row[2] for row in rows) + 64, POISON, np.uint8)
    there, target = uploaded(source), uploaded(expected)
    for source_at, target_at, size in rows:
        expected[target_at : target_at + size] = source[source_at : source_at + size]
    offsets = np.array([[there.data_ptr(), target.data_ptr(), 0]], np.uint64)
    table = uploaded(np.array(rows, np.uint64) + offsets)
    device.submit([Move(stream, table.data_ptr(), len(rows))])
    stream.synchronize()
    wrong = np.flatnonzero(downloaded(target) != expected)
    assert wrong.size == 0, f"{wrong.size} bytes differ, the first at {wrong[0]}"


def laid_out(pieces: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """(source alignment, target alignment, bytes) -> rows whose targets do not touch each other."""
    rows, at = [], 0
    for source_alignment, target_alignment, size in pieces:
        rows.append((at + source_alignment, at + target_alignment, size))
        at += -(-(size + 64) // 32) * 32
    return rows


def test_move_copies_every_alignment_and_nothing_else(device: TorchDevice, stream: Stream) -> None:
    random = np.random.default_rng(1)
    pieces = [(a, b, int(random.integers(0, 5001))) for a in range(18) for b in range(18) for _ in range(3)]
    move_is_exact(device, stream, laid_out(pieces))


def test_move_copies_every_length(device: TorchDevice, stream: Stream) -> None:
    random = np.random.default_rng(2)
    pieces = [(*map(int, random.integers(0, 18, 2)), size) for size in range(5001)]
    pieces += [(0, 0, size) for size in range(5001)]
    move_is_exact(device, stream, laid_out(pieces))


@pytest.mark.parametrize(("source_at", "target_at"), [(0, 0), (5, 5), (4, 0), (1, 0), (0, 15)])
def test_move_copies_long_rows(device: TorchDevice, stream: Stream, source_at: int, target_at: int) -> None:
    move_is_exact(device, stream, laid_out([(source_at, target_at, (8 << 20) + 3), (source_at, target_at, 70_001)]))


def test_move_of_nothing_is_nothing(device: TorchDevice, stream: Stream) -> None:
    device.submit([Move(stream, 0, 0)])
    with pytest.raises(DeviceError, match=f"{2**40} rows"):
        device.submit([Move(stream, 256, 2**40)])
    stream.synchronize()


# --- digest ---


def digest_is_exact(device: TorchDevice, stream: Stream, payload: Bytes, starts: list[int], gaps: list[int]) -> None:
    """Cut the payload at `starts`, put each run as many bytes behind the last one's end as `gaps` says, digest that."""
    memory = np.full(len(payload) + sum(gaps) + 64, POISON, np.uint8)
    table = np.zeros((len(starts), 2), np.uint64)
    at = 0
    for row, start, end, gap in zip(table, starts, [*starts[1:], len(payload)], gaps, strict=True):
        at += gap
        memory[at : at + end - start] = payload[start:end]
        row[:] = start, at
        at += end - start
    there = uploaded(memory)
    table[:, 1] += np.uint64(there.data_ptr())
    runs, tiles = uploaded(table), tile_count(len(payload))
    digests = uploaded(np.full(tiles + 2, 0x5555, np.uint64))
    device.submit([Digest(stream, runs.data_ptr(), len(starts), len(payload), digests.data_ptr() + 8)])
    stream.synchronize()
    found = downloaded(digests).view(np.uint64)
    reference = PayloadChecksum()
    reference.update(payload)
    assert combine(found[1:-1]) == reference.intdigest(), f"{len(payload)} bytes in {len(starts)} runs"
    assert found[[0, -1]].tolist() == [0x5555, 0x5555]


@pytest.mark.parametrize("length", LENGTHS)
def test_digest_of_one_run_is_that_of_xxhash(device: TorchDevice, stream: Stream, length: int) -> None:
    payload = random_bytes(np.random.default_rng(length), length)
    for gap in (0, 1, 8, 16):
        digest_is_exact(device, stream, payload, [0], [gap])


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("unit", [1, 16, 1024])
def test_digest_does_not_depend_on_how_the_payload_is_cut(
    device: TorchDevice, stream: Stream, length: int, unit: int
) -> None:
    random = np.random.default_rng([length, unit])
    payload = random_bytes(random, length)
    for pieces in (2, 7, 300):
        starts = sorted({0, *(random.integers(0, length, pieces) // unit * unit).tolist()})
        gaps = (random.integers(0, 40, len(starts)) * (16 if unit > 1 else 1)).tolist()
        digest_is_exact(device, stream, payload, starts, gaps)


def test_digest_of_a_large_payload_of_pages(device: TorchDevice, stream: Stream) -> None:
    payload = random_bytes(np.random.default_rng(3), 64 << 20)
    starts = list(range(0, len(payload), 24 << 10))
    digest_is_exact(device, stream, payload, starts, [4096] * len(starts))


def test_digest_of_nothing_is_nothing_and_of_no_runs_an_error(device: TorchDevice, stream: Stream) -> None:
    device.submit([Digest(stream, 0, 0, 0, 0)])
    with pytest.raises(DeviceError, match="runs for 16 bytes"):
        device.submit([Digest(stream, 256, 0, 16, 256)])
    stream.synchronize()


# --- copy ---


def mapped_memory(size: int) -> Bytes:
    return np.frombuffer(mmap.mmap(-1, size), np.uint8)


def there_and_back(device: TorchDevice, stream: Stream, host: Bytes) -> None:
    """Many rows from host to device, inside the device, and back to other host bytes, in the order of the stream."""
    random = np.random.default_rng(4)
    half = len(host) // 2
    host[:half], host[half:] = random_bytes(random, half), POISON
    expected = host.copy()
    memory, other = (uploaded(np.full(half, POISON, np.uint8)) for _ in range(2))
    base, rows = host.ctypes.data, []
    for at in range(0, half - 8192, 8192):
        source_at, size = at + int(random.integers(0, 64)), int(random.integers(1, 8000))
        rows.append((source_at, at + int(random.integers(0, 64)), size))
        expected[half + at : half + at + size] = host[source_at : source_at + size]
    rows.append((0, half - 100, 0))  # nothing: to be left out

    def table(source: int, target: int, columns: list[tuple[int, int, int]]) -> Words:
        return np.array(columns, np.uint64) + np.array([[source, target, 0]], np.uint64)

    back = [(middle, start // 8192 * 8192, size) for start, middle, size in rows[:-1]]
    device.submit(
        [
            Copy(stream, table(base, memory.data_ptr(), rows)),
            Copy(stream, table(memory.data_ptr(), other.data_ptr(), [(b, b, size) for _, b, size in rows])),
            Copy(stream, table(other.data_ptr(), base + half, back)),
        ]
    )
    stream.synchronize()
    wrong = np.flatnonzero(host != expected)
    assert wrong.size == 0, f"{wrong.size} bytes differ, the first at {wrong[0]} of {len(host)}"


def test_copies_between_pinned_memory_and_the_device(device: TorchDevice, stream: Stream) -> None:
    there_and_back(device, stream, device.pinned_memory(4 << 20))


def test_copies_between_registered_memory_and_the_device(device: TorchDevice, stream: Stream) -> None:
    host = mapped_memory(4 << 20)
    device.register(host.ctypes.data, host.size)
    try:
        there_and_back(device, stream, host)
    finally:
        device.unregister(host.ctypes.data)


def test_copies_between_memory_that_is_not_registered_and_the_device(device: TorchDevice, stream: Stream) -> None:
    there_and_back(device, stream, mapped_memory(4 << 20))


def test_copies_on_the_default_stream(device: TorchDevice) -> None:
    device.enter()
    there_and_back(device, device.compute_stream(), device.pinned_memory(1 << 20))


def test_copies_of_another_thread(device: TorchDevice) -> None:
    failures: list[BaseException] = []

    def copy() -> None:
        try:
            device.enter()
            there_and_back(device, device.side_stream(), device.pinned_memory(1 << 20))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()
    assert failures == []


def test_copy_of_no_rows_is_nothing(device: TorchDevice, stream: Stream) -> None:
    device.submit([Copy(stream, np.zeros((0, 3), np.uint64))])
    device.submit([Copy(stream, np.array([[256, 256, 0]], np.uint64))])
    stream.synchronize()


# --- registration ---


def test_refused_registration_is_an_error_and_harms_nothing_later(device: TorchDevice, stream: Stream) -> None:
    host = mapped_memory(1 << 20)
    device.register(host.ctypes.data, host.size)
    try:
        with pytest.raises(DeviceError, match="cudaErrorHostMemoryAlreadyRegistered"):
            device.register(host.ctypes.data, host.size)
    finally:
        device.unregister(host.ctypes.data)
    with pytest.raises(DeviceError, match="cudaErrorHostMemoryNotRegistered"):
        device.unregister(host.ctypes.data)
    with pytest.raises(DeviceError, match="cudaError"):
        device.register(0x10000, 4096)
    # Neither our launches nor torch's report it once more.
    move_is_exact(device, stream, [(0, 0, 1000)])
    assert torch.ones(3, device="cuda:0").sum().item() == 3


# --- streams and memory ---


def test_side_streams_have_the_lowest_priority_and_are_not_the_compute_stream(device: TorchDevice) -> None:
    device.enter()
    side, compute = device.side_stream(), device.compute_stream()
    assert isinstance(side, TorchStream)
    assert isinstance(compute, TorchStream)
    assert side.stream.priority == max(torch.cuda.Stream.priority_range())
    assert side.handle not in (0, compute.handle)
    with torch.cuda.stream(side.stream):
        assert device.compute_stream().handle == side.handle  # type: ignore[attr-defined]


def test_event_holds_a_side_stream_back(device: TorchDevice, stream: Stream) -> None:
    device.enter()
    host = device.pinned_memory(1 << 16)
    host[:] = POISON
    tensor = torch.zeros(1 << 16, dtype=torch.uint8, device="cuda:0")
    tensor.fill_(1), torch.cuda._sleep(1)  # loaded now: later that would wait for the long kernel
    torch.cuda.synchronize()
    torch.cuda._sleep(300_000_000)  # cycles: more than 0.1 s
    tensor.fill_(7)
    written = device.compute_stream().record()
    assert not written.done()
    copied = device.event()
    rows = np.array([[tensor.data_ptr(), host.ctypes.data, host.size]], np.uint64)
    device.submit([Wait(stream, written), Copy(stream, rows), Record(stream, copied)])
    assert not copied.done()
    stream.synchronize()
    assert written.done()
    assert copied.done()
    assert (host == 7).all()


def test_event_that_is_used_again_marks_the_new_place_only(device: TorchDevice, stream: Stream) -> None:
    """Whoever waited for the old mark waited for that; a new mark is not over because the old one was."""
    device.enter()
    event = device.event()
    handle = event_handle(event)
    assert handle
    device.submit([Record(stream, event)])
    stream.synchronize()
    assert event.done()
    del event
    with torch.cuda.stream(stream.stream):  # type: ignore[attr-defined]
        torch.cuda._sleep(100_000_000)
    again = device.event()
    assert event_handle(again) == handle, "events come back"
    device.submit([Record(stream, again)])
    assert not again.done()
    stream.synchronize()
    assert again.done()


def test_device_memory_is_aligned_and_usable(device: TorchDevice, stream: Stream) -> None:
    memory, host = device.device_memory(10_001), device.pinned_memory(10_001)
    assert memory.address % 256 == 0
    host[:] = np.arange(10_001) % 251
    expected = host.copy()
    device.submit([Copy(stream, np.array([[host.ctypes.data, memory.address, host.size]], np.uint64))])
    stream.synchronize()
    host[:] = POISON
    device.submit([Copy(stream, np.array([[memory.address, host.ctypes.data, host.size]], np.uint64))])
    stream.synchronize()
    assert np.array_equal(host, expected)


def test_device_says_what_it_is(device: TorchDevice) -> None:
    assert device.name in ("csrc", "cupy")
    assert device.why.startswith("test (")
    if device.name == "csrc":
        assert "one call for many copies" in device.why  # a driver that runs CUDA 13 has it
