"""Repairs for vLLM versions that have no channel for what this connector needs to say.

Installed only in a scheduler process that uses this connector, over functions whose shape was checked first.

* 0.26 and 0.27 let the attention hit of a hybrid model run deeper than its recurrent state whenever any connector is
  attached (vLLM issue 53505). The gate makes them reconcile the groups first, as newer versions do.
* 0.26 to 0.28 kill the engine core when a load fails on a model with several KV cache groups. The gate marks such a
  request as `failed_recving_kv_req_ids` with nothing computed, which makes vLLM free its blocks and look it up afresh.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from lmcache_mp_safe.compat.features import HostFeatures
from lmcache_mp_safe.errors import ConfigError

_MARK = "_lmcache_mp_safe_gate"


def install(features: HostFeatures) -> None:
    """Install what this vLLM needs; installing twice changes nothing.

    Raises:
        ConfigError: a function that has to be wrapped does not look as expected.
    """
    if features.divergent_lookup == "manager":
        _replace_manager_lookup()
    elif features.divergent_lookup == "scheduler":
        _wrap(Scheduler, "schedule", _with_plain_lookup)
    if not features.reports_failed_loads:
        _check_failed_load_path()
        _wrap(Scheduler, "update_from_output", _with_failed_loads)


def installed() -> tuple[str, ...]:
    """The functions of vLLM that are replaced in this process."""
    places: tuple[tuple[type, str], ...] = (
        (KVCacheManager, "get_computed_blocks_for_connector"),
        (Scheduler, "schedule"),
        (Scheduler, "update_from_output"),
    )
    return tuple(
        f"{owner.__name__}.{name}" for owner, name in places if getattr(getattr(owner, name, None), _MARK, False)
    )


def _wrap(owner: type, name: str, wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = getattr(owner, name)
    if getattr(original, _MARK, False):
        return
    wrapped = functools.wraps(original)(wrapper(original))
    setattr(wrapped, _MARK, True)
    setattr(owner, name, wrapped)


def _replace_manager_lookup() -> None:
    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        if list(inspect.signature(original).parameters) != ["self", "request"]:
            raise ConfigError(_unknown_shape("KVCacheManager.get_computed_blocks_for_connector"))

        def reconciled(self: KVCacheManager, request: Any) -> tuple[Any, ...]:
            return (*self.get_computed_blocks(request), False)

        return reconciled

    _wrap(KVCacheManager, "get_computed_blocks_for_connector", wrapper)


def _with_plain_lookup(original: Callable[..., Any]) -> Callable[..., Any]:
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        # The flag's only use after construction is the branch into the divergent lookup.
        self.has_mamba_layers = False
        return original(self, *args, **kwargs)

    return schedule


def _check_failed_load_path() -> None:
    names = Scheduler._update_waiting_for_remote_kv.__code__.co_names
    if not {"failed_recving_kv_req_ids", "num_computed_tokens", "free"} <= set(names):
        raise ConfigError(_unknown_shape("Scheduler._update_waiting_for_remote_kv"))


def _with_failed_loads(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_from_output(self: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = original(self, *args, **kwargs)
        for connector in _connectors(self.connector):
            for request_id in connector.take_failed_loads():
                request = self.requests.get(request_id)
                if request is not None and request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                    request.num_computed_tokens = 0
                    self.failed_recving_kv_req_ids.add(request_id)
        return outputs

    return update_from_output


def _connectors(connector: Any) -> list[Any]:
    """Our connectors: the scheduler's own, or children of a MultiConnector."""
    children = getattr(connector, "_connectors", None)
    found = children if isinstance(children, list) else [connector]
    return [child for child in found if hasattr(child, "take_failed_loads")]


def _unknown_shape(name: str) -> str:
    return f"vLLM's {name} does not look as the gate expects; use vLLM 0.26, 0.27 or 0.28 and newer"
