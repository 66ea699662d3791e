"""Entry point of `vllm.general_plugins`: makes `kv_connector=LMCacheMPSafeConnector` known in every vLLM process."""

from __future__ import annotations

import os

CONNECTOR = "LMCacheMPSafeConnector"


def register() -> None:
    """Called by vLLM in each of its processes, possibly more than once; imports nothing heavy."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "lmcache_mp_safe.connector", CONNECTOR)
    if "LMCACHE_MP_SAFE_CPU_GUARDS" in os.environ:
        # Set by the demo and the tests only: their engines run on vLLM's CPU build, also in child processes.
        from lmcache_mp_safe.testing.cpu_guards import apply_from_environment

        apply_from_environment()
