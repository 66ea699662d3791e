"""A KV connector for vLLM that keeps KV cache in a stock LMCache server and never changes what the model says."""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"
__all__ = ["LMCacheMPSafeConnector", "__version__"]


def __getattr__(name: str) -> Any:
    # Imported on first use: the module needs vLLM, and most of this package does not.
    if name == "LMCacheMPSafeConnector":
        from lmcache_mp_safe.connector import LMCacheMPSafeConnector

        return LMCacheMPSafeConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
