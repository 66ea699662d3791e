"""Build script of the one thing that pyproject.toml cannot say: how csrc/ becomes `lmcache_mp_safe/_cuda.so`.

    LMCACHE_MP_SAFE_CUDA=auto      build it where there is nvcc, and say so where it is not built (the default)
    LMCACHE_MP_SAFE_CUDA=1         build it, or fail
    LMCACHE_MP_SAFE_CUDA=0         do not build it
    LMCACHE_MP_SAFE_CUDA_ARCHS=90  for these architectures (compute capabilities, with commas), not all that nvcc knows

It is a plain C library that Python loads at run time, so it does not depend on a version of Python or torch. Without it
cupy compiles the same kernels, where it is installed; `lmcache_mp_safe.ops` says at run time what it took and why.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.errors import CompileError, ExecError

SOURCES = ["csrc/bindings.cpp", "csrc/commands.cpp", "csrc/copies.cpp", "csrc/launch.cu"]
HEADERS = sorted(map(str, Path("csrc").rglob("*.*h")))
ARCHITECTURES = ["80", "86", "89", "90", "100", "120"]


def find_nvcc() -> str | None:
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    candidates = [f"{home}/bin/nvcc" for home in homes] + ["nvcc", "/usr/local/cuda/bin/nvcc"]
    return next(filter(None, map(shutil.which, candidates)), None)


def architectures_for(nvcc: str) -> list[str]:
    if wanted := os.environ.get("LMCACHE_MP_SAFE_CUDA_ARCHS"):
        return [architecture.strip() for architecture in wanted.split(",")]
    known = subprocess.run([nvcc, "--list-gpu-arch"], check=True, capture_output=True, text=True).stdout.split()
    return [architecture for architecture in ARCHITECTURES if f"compute_{architecture}" in known]


def nvcc_arguments(architectures: list[str]) -> list[str]:
    newest = architectures[-1]  # as PTX, too: newer devices compile that
    code = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in architectures]
    return [
        *("-std=c++17", "-O3", "-shared", "-cudart=static", "--threads=0"),
        *(*code, f"-gencode=arch=compute_{newest},code=compute_{newest}"),
        "-Xcompiler=-fPIC,-fvisibility=hidden,-Wno-unknown-pragmas",
        f'-DCOMPILED_ARCHITECTURES="{" ".join(f"sm_{a}" for a in architectures)}"',
    ]


class BuildLibrary(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return fullname.replace(".", "/") + ".so"  # not named after this Python

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.unlink(missing_ok=True)  # an old one must not outlive a failure
        target.parent.mkdir(parents=True, exist_ok=True)
        nvcc = find_nvcc() or "nvcc"
        try:
            self.spawn([nvcc, *nvcc_arguments(architectures_for(nvcc)), *SOURCES, "-o", str(target)])
        except (OSError, subprocess.CalledProcessError, ExecError) as error:
            raise CompileError(f"{ext.name}: {error}") from error


class BuildPython(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # a checkout has them beside the package
            for source in Path("csrc/kernels").glob("*.cuh"):
                target = Path(self.build_lib) / "lmcache_mp_safe" / "kernels" / source.name
                self.mkpath(str(target.parent))
                self.copy_file(str(source), str(target))


class BuildWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        platform = super().get_tag()[2]
        return "py3", "none", platform


def extensions() -> list[Extension]:
    wanted = os.environ.get("LMCACHE_MP_SAFE_CUDA", "auto")
    if wanted not in ("auto", "0", "1"):
        raise SystemExit(f"LMCACHE_MP_SAFE_CUDA is {wanted!r}: say 0, 1 or auto")
    if wanted == "0" or (wanted == "auto" and find_nvcc() is None):
        why = "LMCACHE_MP_SAFE_CUDA=0" if wanted == "0" else "no nvcc in CUDA_HOME, CUDA_PATH, PATH or /usr/local/cuda"
        sys.stderr.write(f"lmcache-mp-safe: the CUDA library is not built: {why}\n")
        return []
    # An optional extension that fails is reported in a line, and left out.
    return [Extension("lmcache_mp_safe._cuda", sources=SOURCES, depends=HEADERS, optional=wanted == "auto")]


setup(
    ext_modules=extensions(),
    cmdclass={"build_ext": BuildLibrary, "build_py": BuildPython, "bdist_wheel": BuildWheel},
)
