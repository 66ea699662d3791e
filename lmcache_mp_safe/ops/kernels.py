"""The CUDA kernels' source, and how many CTAs they are launched with where csrc/ does not launch them itself.

The numbers are those of csrc/plan.h and of the kernels' own files; tests compare them.
"""

from __future__ import annotations

from pathlib import Path

from lmcache_mp_safe.geometry.checksum import tile_count
from lmcache_mp_safe.ops.device import DeviceError

PACKAGE = Path(__file__).parents[1]

THREADS = 128
THREADS_PER_TILE = 4
MOVE_CTAS_PER_MULTIPROCESSOR = 8
MULTIPROCESSORS_PER_DIGEST_CTA = 2


def kernel_source(name: str) -> str:
    """The text of csrc/kernels/<name>.cuh: in a package that was built it lies inside, in a checkout beside."""
    places = [PACKAGE / "kernels", PACKAGE.parent / "csrc" / "kernels"]
    for place in places:
        if (place / f"{name}.cuh").exists():
            return (place / f"{name}.cuh").read_text()
    raise DeviceError(f"{name}.cuh is neither in {places[0]} nor in {places[1]}: install the package anew")


def move_grid(count: int, multiprocessors: int) -> int:
    return min(count, MOVE_CTAS_PER_MULTIPROCESSOR * multiprocessors)


def digest_grid(length: int, multiprocessors: int) -> int:
    needed = -(-tile_count(length) * THREADS_PER_TILE // THREADS)
    return min(needed, max(multiprocessors // MULTIPROCESSORS_PER_DIGEST_CTA, 1))
