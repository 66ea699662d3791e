"""Versions that the tests run on. Everything else is found by looking, see `features.py`."""

from __future__ import annotations

TESTED_VLLM = ("0.26.0", "0.27.1", "0.32.0")  # 0.26.0 on a GPU, the others on a CPU
TESTED_LMCACHE = ("0.5.6",)
