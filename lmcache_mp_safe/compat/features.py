"""What the installed vLLM can do, found by looking at it. No version is compared anywhere."""

from __future__ import annotations

from dataclasses import dataclass

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler

from lmcache_mp_safe.errors import ConfigError


@dataclass(frozen=True)
class HostFeatures:
    """How this vLLM treats KV connectors.

    Attributes:
        asks_capability: its scheduler asks `supports_divergent_local_hybrid_hits` (0.28 and newer).
        reports_failed_loads: a failed load is reported per request, through `get_transfer_results` (0.32 and newer).
        divergent_lookup: else, where its divergent hybrid lookup for connectors sits: `manager` (0.27), `scheduler`
            (0.26), or `none`.
        pads_remainder: a remainder of one prompt token is padded with draft rows (0.27), so a hit leaves two.
    """

    asks_capability: bool
    reports_failed_loads: bool
    divergent_lookup: str
    pads_remainder: bool

    @property
    def lookup_path(self) -> str:
        """One line for the start-up log and `doctor`."""
        if self.asks_capability:
            return "vLLM asks for the capability; hybrid hits are reconciled before the connector is asked"
        if self.divergent_lookup == "none":
            return "this vLLM has no divergent hybrid lookup"
        return f"gate installed over the divergent hybrid lookup in vLLM's {self.divergent_lookup}"


def host_version() -> str:
    """For people to read; nothing is decided by it."""
    return str(vllm.__version__)


def probe() -> HostFeatures:
    """Look at the installed vLLM.

    Raises:
        ConfigError: it neither asks for the capability nor has a shape that a gate is known to fit.
    """
    asks = hasattr(KVConnectorBase_V1, "supports_divergent_local_hybrid_hits")
    reports = hasattr(KVConnectorBase_V1, "get_transfer_results")
    lookup = "none"
    if not asks:
        lookup = _divergent_lookup()
    return HostFeatures(asks, reports, lookup, pads_remainder=not asks)


def _divergent_lookup() -> str:
    if hasattr(KVCacheManager, "get_computed_blocks_for_connector"):
        return "manager"
    if "has_mamba_layers" in Scheduler.schedule.__code__.co_names:
        return "scheduler"
    raise ConfigError(
        "this vLLM does not ask connectors whether they can complete divergent hybrid prefix hits, and its lookup has"
        " no shape that is known here; use vLLM 0.26, 0.27 or 0.28 and newer"
    )
