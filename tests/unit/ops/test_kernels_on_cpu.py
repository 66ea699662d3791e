"""The kernels' arithmetic and the decisions around them, compiled for the CPU from the files that the GPU gets."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from ctypes import c_int, c_int64, c_uint, c_uint64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmcache_mp_safe.geometry.checksum import PayloadChecksum, combine, tile_count
from lmcache_mp_safe.ops import kernels
from lmcache_mp_safe.ops.device import Bytes, DeviceError, Words

ROOT = Path(__file__).parents[3]
POISON = 0xA5
LENGTHS = [1, 15, 16, 17, 1023, 1024, 1025, 16383, 16384, 16385, 100_000, (3 << 20) + 5]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ on this machine")
    library = tmp_path_factory.mktemp("model") / "model.so"
    flags = ["-std=c++17", "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    source = Path(__file__).with_name("host_model.cpp")
    subprocess.run([compiler, *flags, "-I", ROOT / "csrc", source, "-o", library], check=True)
    loaded = ctypes.CDLL(str(library))
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "digest": (None, [c_void_p, c_int, c_uint64, c_void_p]),
        "move": (None, [c_void_p, c_int, c_uint]),
        "move_grid": (c_uint, [c_int64, c_int]),
        "digest_grid": (c_uint, [c_uint64, c_int]),
        "move_is_refused": (c_int, [c_uint64, c_int64]),
        "digest_is_refused": (c_int, [c_uint64, c_int64, c_uint64, c_uint64]),
        "split_is_refused": (c_int, [c_void_p, c_int64]),
        "split": (c_int64, [c_void_p, c_int64, c_void_p, c_void_p, c_void_p]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def aligned(size: int) -> Bytes:
    """Memory at a multiple of 256, as that of a device is."""
    memory = np.full(size + 256, POISON, np.uint8)
    return memory[-memory.ctypes.data % 256 :][:size]


def scattered(payload: Bytes, starts: list[int], gaps: list[int]) -> tuple[Bytes, Words]:
    """The payload cut at `starts`, each run as many bytes behind the last one's end as `gaps` says; the runs' table."""
    ends = [*starts[1:], len(payload)]
    memory = aligned(len(payload) + sum(gaps) + 16)
    table = np.zeros((len(starts), 2), np.uint64)
    at = 0
    for row, start, end, gap in zip(table, starts, ends, gaps, strict=True):
        at += gap
        memory[at : at + end - start] = payload[start:end]
        row[:] = start, memory.ctypes.data + at
        at += end - start
    return memory, table


def checksum(payload: Bytes) -> int:
    reference = PayloadChecksum()
    reference.update(payload)
    return reference.intdigest()


def digest(model: ctypes.CDLL, table: Words, length: int) -> int:
    digests = np.zeros(tile_count(length), np.uint64)
    model.digest(table.ctypes.data, len(table), length, digests.ctypes.data)
    return combine(digests)


@pytest.mark.parametrize("length", LENGTHS)
def test_digest_of_one_aligned_run_is_that_of_xxhash(model: ctypes.CDLL, length: int) -> None:
    payload = np.random.default_rng(length).integers(0, 256, length, np.uint8)
    memory, table = scattered(payload, [0], [0])
    assert digest(model, table, length) == checksum(payload)
    assert memory.size


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("unit", [1, 16, 1024])
def test_digest_does_not_depend_on_how_the_payload_is_cut(model: ctypes.CDLL, length: int, unit: int) -> None:
    random = np.random.default_rng([length, unit])
    payload = random.integers(0, 256, length, np.uint8)
    for pieces in (2, 7, 100):
        cuts = random.integers(0, length, pieces) // unit * unit
        starts = sorted({0, *cuts.tolist()})
        # With units of 16 bytes and more, runs stay aligned: the wide loads and their ends are what is tested.
        gaps = (random.integers(0, 40, len(starts)) * (16 if unit > 1 else 1)).tolist()
        memory, table = scattered(payload, starts, gaps)
        assert digest(model, table, length) == checksum(payload)
        assert memory.size


def test_digest_ignores_what_lies_behind_the_payload(model: ctypes.CDLL) -> None:
    payload = np.arange(5000, dtype=np.uint8)
    memory, table = scattered(payload, [0], [0])
    assert digest(model, table, 4000) == checksum(payload[:4000])
    assert memory.size


@pytest.mark.parametrize("threads", [32, 128])
def test_move_copies_every_alignment_and_nothing_else(model: ctypes.CDLL, threads: int) -> None:
    random = np.random.default_rng(threads)
    source = random.integers(0, 256, 100_000, np.uint8)
    lengths = [*range(70), 127, 128, 129, 2047, 2048, 2049, 5000, 70_001]
    for source_at in range(18):
        for target_at in range(18):
            size = int(random.choice(lengths))
            target = aligned(100_000)
            expected = target.copy()
            expected[target_at : target_at + size] = source[source_at : source_at + size]
            row = np.array([[source.ctypes.data + source_at, target.ctypes.data + target_at, size]], np.uint64)
            model.move(row.ctypes.data, 1, threads)
            assert np.array_equal(target, expected), (source_at, target_at, size)


def test_move_copies_every_length(model: ctypes.CDLL) -> None:
    random = np.random.default_rng(0)
    source = random.integers(0, 256, 6000, np.uint8)
    for size in range(0, 5000, 7):
        target = aligned(6000)
        source_at, target_at = random.integers(0, 17, 2)
        expected = target.copy()
        expected[target_at : target_at + size] = source[source_at : source_at + size]
        row = np.array([[source.ctypes.data + source_at, target.ctypes.data + target_at, size]], np.uint64)
        model.move(row.ctypes.data, 1, 128)
        assert np.array_equal(target, expected), (source_at, target_at, size)


def test_grids_are_the_same_in_both_languages(model: ctypes.CDLL) -> None:
    assert model.threads() == kernels.THREADS
    assert model.parts() == kernels.THREADS_PER_TILE
    for count in (1, 2, 1055, 1056, 1057, 1 << 30):
        assert model.move_grid(count, 132) == kernels.move_grid(count, 132) == min(count, 1056)
    for length in (1, 16384, 16385, 32 << 14, (32 << 14) + 1, 1 << 40):
        for multiprocessors, most in ((1, 1), (132, 66)):
            expected = min(-(-length // (32 << 14)), most)
            assert (
                model.digest_grid(length, multiprocessors) == kernels.digest_grid(length, multiprocessors) == expected
            )


def test_arguments_that_make_no_sense_are_refused(model: ctypes.CDLL) -> None:
    assert [model.move_is_refused(*arguments) for arguments in ((0, 1), (8, -1), (8, 1 << 31))] == [1, 1, 1]
    assert [model.move_is_refused(*arguments) for arguments in ((0, 0), (8, 1))] == [0, 0]
    wrong = ((0, 1, 1, 8), (8, 0, 1, 8), (8, -1, 1, 8), (8, 1, 1, 0), (8, 1 << 31, 1, 8))
    assert [model.digest_is_refused(*arguments) for arguments in wrong] == [1] * 5
    assert [model.digest_is_refused(*arguments) for arguments in ((0, 0, 0, 0), (8, 1, 1, 8))] == [0, 0]
    assert [model.split_is_refused(None, count) for count in (-1, 0, 1)] == [1, 0, 1]


def test_rows_become_columns_without_the_empty_ones(model: ctypes.CDLL) -> None:
    rows = np.array([[1, 2, 3], [4, 5, 0], [7, 8, 1 << 40]], np.uint64)
    columns = np.zeros((3, 3), np.uint64)
    left = model.split(rows.ctypes.data, len(rows), *(column.ctypes.data for column in columns))
    assert columns[:, :left].T.tolist() == [[1, 2, 3], [7, 8, 1 << 40]]


def test_source_of_the_kernels_is_found_and_a_missing_one_is_named() -> None:
    assert "digest_tiles" in kernels.kernel_source("digest")
    assert "move_runs" in kernels.kernel_source("move")
    with pytest.raises(DeviceError, match=r"nothing\.cuh is neither in"):
        kernels.kernel_source("nothing")
