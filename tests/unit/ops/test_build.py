"""The CUDA library: that it builds, loads without a GPU, and says what is wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lmcache_mp_safe.errors import LocalError
from lmcache_mp_safe.ops.device import Copy, DeviceError, Digest, Move, Record
from lmcache_mp_safe.ops.native import COMMANDS, SIGNATURES, Library, NativeDevice, load_library
from lmcache_mp_safe.ops.torch_device import stream_handle

ROOT = Path(__file__).parents[3]
RECORD, COPY, MOVE, DIGEST = map(COMMANDS.index, (Record, Copy, Move, Digest))
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")


def build(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "-q", "build_ext", f"--build-lib={folder}", f"--build-temp={folder}/temp"]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, text=True, capture_output=True)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("build")
    done = build(folder, LMCACHE_MP_SAFE_CUDA="auto", LMCACHE_MP_SAFE_CUDA_ARCHS="80,90")
    if "no nvcc" in done.stderr:
        pytest.skip(done.stderr.strip())
    library = folder / "lmcache_mp_safe" / "_cuda.so"
    assert library.exists(), done.stdout + done.stderr
    return library


@pytest.fixture
def library(built: Path) -> Library:
    return load_library(built)


def test_library_says_what_it_was_built_for(library: Library) -> None:
    assert str(library).startswith("compiled for sm_80 sm_90 with CUDA ")


def test_library_needs_nothing_but_the_c_library_and_exports_nothing_but_its_functions(built: Path) -> None:
    needed = subprocess.run(["readelf", "-d", built], check=True, capture_output=True, text=True).stdout
    assert "libcudart" not in needed
    assert "libcuda" not in needed
    symbols = subprocess.run(["nm", "-D", "--defined-only", built], check=True, capture_output=True, text=True).stdout
    names = {line.split()[-1] for line in symbols.splitlines()}
    assert {name for name in names if name.startswith("lmcache")} == {f"lmcache_mp_safe_{name}" for name in SIGNATURES}
    assert not {name for name in names if name.startswith("cuda") and "@" not in name}


@NO_GPU
def test_status_of_cuda_comes_back_as_an_error_with_file_and_line(library: Library) -> None:
    memory = np.zeros(4096, np.uint8)
    with pytest.raises(DeviceError, match=r"csrc/bindings\.cpp:\d+: cudaHostRegister\(.*\): cudaError\w+, .+"):
        library.call("register", memory.ctypes.data, memory.size)
    rows = np.array([memory.ctypes.data, memory.ctypes.data, 8], np.uint64)
    with pytest.raises(DeviceError, match=r"csrc/copies\.cpp:\d+: cudaMemcpyAsync\("):
        library.submit([[COPY, 0, rows.ctypes.data, 1]])
    with pytest.raises(DeviceError, match=r"csrc/launch\.cu:\d+: "):
        library.submit([[MOVE, 0, memory.ctypes.data, 1]])
    with pytest.raises(DeviceError, match=r"csrc/commands\.cpp:\d+: cudaEventRecord\("):
        library.submit([[RECORD, 0, memory.ctypes.data]])
    assert not library.has_batch_copy


def test_arguments_are_checked_before_anything_is_launched(library: Library) -> None:
    with pytest.raises(DeviceError, match=f"move: {2**63} rows|move: -{2**63} rows"):
        library.submit([[MOVE, 0, 256, 2**63]])
    with pytest.raises(DeviceError, match="digest: no runs for 16 bytes"):
        library.submit([[DIGEST, 0, 256, 0, 16, 256]])
    with pytest.raises(DeviceError, match="copy: no rows"):
        library.submit([[COPY, 0, 0, 1]])
    with pytest.raises(DeviceError, match="no command has the number 5"):
        library.submit([[len(COMMANDS), 0]])
    library.submit([[MOVE, 0, 0, 0], [DIGEST, 0, 0, 0, 0, 0], [COPY, 0, 0, 0]])
    library.submit([])


def test_library_that_is_missing_or_foreign_says_how_to_build_it(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"was not built.*LMCACHE_MP_SAFE_CUDA=1 pip install"):
        load_library(tmp_path / "_cuda.so")
    (tmp_path / "_cuda.so").write_text("not a library")
    with pytest.raises(DeviceError, match=r"does not fit here.*LMCACHE_MP_SAFE_CUDA=1 pip install"):
        load_library(tmp_path / "_cuda.so")


@NO_GPU
def test_device_without_a_gpu_is_an_error_of_the_device(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_mp_safe.ops.native.load_library", lambda: load_library(built))
    with pytest.raises(DeviceError, match=r"CUDA|NVIDIA"):
        NativeDevice("cuda:0", why="test")


def test_stream_of_another_device_is_our_own_mistake() -> None:
    with pytest.raises(LocalError, match="another device"):
        stream_handle(object())  # type: ignore[arg-type]


def test_build_that_is_not_wanted_says_so(tmp_path: Path) -> None:
    done = build(tmp_path, LMCACHE_MP_SAFE_CUDA="0")
    assert done.returncode == 0
    assert "the CUDA library is not built: LMCACHE_MP_SAFE_CUDA=0" in done.stderr
    assert not list(tmp_path.rglob("*.so"))


def test_build_that_fails_is_fatal_only_where_it_is_wanted(built: Path, tmp_path: Path) -> None:
    wrong = {"LMCACHE_MP_SAFE_CUDA_ARCHS": "1"}
    wanted, optional = (build(tmp_path, LMCACHE_MP_SAFE_CUDA=mode, **wrong) for mode in ("1", "auto"))
    assert built.exists()
    assert wanted.returncode != 0
    assert optional.returncode == 0
    assert 'building extension "lmcache_mp_safe._cuda" failed' in optional.stdout + optional.stderr
