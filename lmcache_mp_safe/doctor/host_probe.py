"""Looks at vLLM, in a process of its own: `python -m lmcache_mp_safe.doctor.host_probe RESULT [ARGUMENTS]`.

vLLM and LMCache take over process-wide state, print, and may end the process. What is known is written to the file
RESULT after every step, so that whatever ends the process, the steps before it count.
"""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from lmcache_mp_safe.config import SafeConfig, parse_config
from lmcache_mp_safe.doctor import facts
from lmcache_mp_safe.doctor.facts import ConnectorKind, Probe
from lmcache_mp_safe.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_PINNED_BYTES = 1 << 20


def main(result: Path, arguments: Sequence[str]) -> None:
    _Prober(result).run(arguments)


class _Prober:
    def __init__(self, result: Path) -> None:
        self._result = result
        self._probe = Probe()

    def run(self, arguments: Sequence[str]) -> None:
        """Steps in order; the first one that fails is the last one that needs the engine's configuration."""
        self._step("vLLM", lambda: {"host": look_at_host()})
        if arguments and not self._probe.failed_at:
            self._engine(arguments)
        if self._probe.host is not None:
            device, wanted = self._probe.host.device, _wanted_backend(self._probe.engine)
            self._step("copies", lambda: {"copies": look_at_copies(device, wanted)})

    def _engine(self, arguments: Sequence[str]) -> None:
        from lmcache_mp_safe.compat import weightless

        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                parsed = weightless.parse_serve_arguments(arguments)
        except SystemExit:
            lines = [line for line in said.getvalue().splitlines() if line.strip()]
            self._write(failed_at="arguments", failure=lines[-1] if lines else "", usage_error=True)
            return
        made: list[VllmConfig] = []

        def configure() -> dict[str, Any]:
            made.append(weightless.engine_config(parsed))
            return {"engine": look_at_engine(made[0])}

        self._step("configuration", configure)
        if self._probe.failed_at:
            return
        self._step("KV cache groups", lambda: {"model": look_at_model(made[0], weightless.kv_cache_config_of(made[0]))})

    def _step(self, name: str, look: Callable[[], Mapping[str, Any]]) -> None:
        # An end of the process leaves this in the file.
        before = self._probe
        if not before.failed_at:
            self._write(failed_at=name, failure="the process that looked at it ended")
        try:
            found = look()
        except Exception as error:
            self._probe = before
            if not before.failed_at:
                self._write(failed_at=name, failure=_words(error))
        else:
            self._probe = before
            self._write(**found)

    def _write(self, **changes: Any) -> None:
        self._probe = msgspec.structs.replace(self._probe, **changes)
        part = self._result.with_suffix(".part")
        part.write_bytes(msgspec.json.encode(self._probe))
        part.rename(self._result)


def _words(error: Exception) -> str:
    """What went wrong, in one line. pydantic's errors have the reason in the third."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])}" if lines else type(error).__name__


# --- vLLM -----------------------------------------------------------------------------------------------------------


def look_at_host() -> facts.Host:
    """The installed vLLM and the device that it would use."""
    import torch
    from vllm.platforms import current_platform

    from lmcache_mp_safe.compat.features import HostFeatures, host_version, probe
    from lmcache_mp_safe.compat.gate import install, installed

    features, gate_error = HostFeatures(False, False, "unknown", True), ""
    try:
        features = probe()
        install(features)
    except ConfigError as error:
        gate_error = str(error)
    device = str(current_platform.device_type or "")
    return facts.Host(
        vllm=host_version(),
        cuda=torch.version.cuda or "",
        device=device,
        device_name=torch.cuda.get_device_name() if device == "cuda" else "",
        asks_capability=features.asks_capability,
        reports_failed_loads=features.reports_failed_loads,
        lookup_path=features.lookup_path,
        gate=installed(),
        gate_error=gate_error,
    )


# --- the engine -----------------------------------------------------------------------------------------------------


def look_at_engine(vllm_config: VllmConfig) -> facts.Engine:
    """What the engine would run with."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    return facts.Engine(
        model=str(model.model),
        architecture=str(model.architecture),
        dtype=str(model.dtype).removeprefix("torch."),
        is_hybrid=bool(getattr(model, "is_hybrid", False)),
        prefix_caching=bool(cache.enable_prefix_caching),
        mamba_cache_mode=str(getattr(cache, "mamba_cache_mode", "none")),
        max_model_len=int(model.max_model_len),
        tensor_ranks=int(parallel.tensor_parallel_size),
        pipeline_ranks=int(parallel.pipeline_parallel_size),
        data_ranks=int(parallel.data_parallel_size),
        speculation="" if speculative is None else str(speculative.method),
        draft_tokens=0 if speculative is None else int(speculative.num_speculative_tokens or 0),
        connector=connector_of(vllm_config.kv_transfer_config),
        drops_last_block=_drops_last_block(vllm_config),
    )


def _drops_last_block(vllm_config: VllmConfig) -> bool:
    from lmcache_mp_safe.compat.model import hit_margin_tokens
    from lmcache_mp_safe.geometry.groups import ModelGeometry

    return hit_margin_tokens(vllm_config, ModelGeometry((), 1, 1)) > 0


def connector_of(transfer: Any) -> facts.Connector:
    """The connector of a `kv_transfer_config`: its own, or the first known one among the children of MultiConnector."""
    if transfer is None or not transfer.kv_connector:
        return facts.Connector(ConnectorKind.NONE)
    outer = {
        "kv_connector": transfer.kv_connector,
        "kv_role": transfer.kv_role,
        "kv_connector_extra_config": dict(transfer.kv_connector_extra_config),
    }
    chosen, in_multi = outer, transfer.kv_connector == "MultiConnector"
    if in_multi:
        children = outer["kv_connector_extra_config"].get("connectors", [])
        known = [child for child in children if _kind(child) is not ConnectorKind.OTHER]
        chosen = known[0] if known else outer
    kind, extra = _kind(chosen), dict(chosen.get("kv_connector_extra_config") or {})
    return facts.Connector(
        kind=kind,
        name=str(chosen["kv_connector"]),
        role=str(chosen.get("kv_role", "")),
        in_multi=in_multi,
        load_failure_policy=str(getattr(transfer, "kv_load_failure_policy", "")),
        extra=extra,
        settings_error=_settings_error(extra) if kind in (ConnectorKind.OURS, ConnectorKind.STOCK) else "",
    )


def _kind(connector: Mapping[str, Any]) -> ConnectorKind:
    try:
        return ConnectorKind(connector.get("kv_connector"))
    except ValueError:
        return ConnectorKind.OTHER


def _settings_error(extra: Mapping[str, Any]) -> str:
    try:
        parse_config(extra)
    except ConfigError as error:
        return str(error)
    return ""


def _settings(connector: facts.Connector) -> SafeConfig:
    usable = connector.kind is ConnectorKind.OURS and not connector.settings_error
    return parse_config(connector.extra) if usable else SafeConfig()


def _wanted_backend(engine: facts.Engine | None) -> str:
    return "auto" if engine is None else _settings(engine.connector).backend


# --- the model ------------------------------------------------------------------------------------------------------


def look_at_model(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> facts.Model:
    """Its groups, and how this connector would treat them."""
    from lmcache_mp_safe.compat.model import geometry_of
    from lmcache_mp_safe.compat.weightless import group_page_bytes
    from lmcache_mp_safe.contract import RankLayout
    from lmcache_mp_safe.scheduler.objects import ModelObjects

    pages = group_page_bytes(kv_cache_config)
    groups = tuple(map(_group, kv_cache_config.kv_cache_groups, pages))
    settings = _settings(connector_of(vllm_config.kv_transfer_config))
    try:
        geometry = geometry_of(vllm_config, kv_cache_config, settings)
    except ConfigError as error:
        return facts.Model(groups, refusal=str(error))
    # Pipeline stages share the layers of a group among them, tensor ranks share its heads.
    ranks = [RankLayout(rank, pages, b"") for rank in range(int(vllm_config.parallel_config.tensor_parallel_size))]
    objects = ModelObjects(geometry, ranks)
    boundaries = geometry.chunk_tokens // geometry.block_tokens if geometry.is_recurrent else 1
    pieces = objects.pieces_at(geometry.chunk_tokens) if geometry.has_boundary_groups else 0
    return facts.Model(
        groups,
        geometry.block_tokens,
        geometry.chunk_tokens,
        objects.layout.object_bytes,
        objects_per_chunk=int(geometry.has_append_only) + boundaries * pieces,
    )


def _group(group: Any, page_bytes: int) -> facts.Group:
    from lmcache_mp_safe.compat.model import classify

    spec, layers = group.kv_cache_spec, len(group.layer_names)
    name = type(_one_layer(spec)).__name__
    try:
        known = classify(spec)
    except ConfigError:
        return facts.Group(name, "", int(spec.block_size), 0, layers, page_bytes)
    return facts.Group(name, known.kind.value, known.block_tokens, known.span_tokens, layers, page_bytes)


def _one_layer(spec: Any) -> Any:
    per_layer = getattr(spec, "kv_cache_specs", None)
    return next(iter(per_layer.values())) if isinstance(per_layer, dict) else spec


# --- copies ---------------------------------------------------------------------------------------------------------


def look_at_copies(device: str, wanted: str) -> facts.Copies:
    """The backend that would copy pages on this device, and whether it can page-lock shared memory."""
    import torch

    from lmcache_mp_safe.ops import choose_backend, make_device

    stock = _stock_ops_error()
    try:
        if device == "cuda":
            made = make_device(torch.device("cuda", torch.cuda.current_device()), wanted)
            refused = _pinning_error(made)
            return facts.Copies(made.name, made.why, "", not refused, refused, stock)
        backend = choose_backend([torch.zeros(4096, dtype=torch.uint8, device=device or None)], wanted)
    except (ConfigError, RuntimeError) as error:
        return facts.Copies("", "", error=str(error), stock_ops_error=stock)
    return facts.Copies(backend.name, backend.why, stock_ops_error=stock)


def _pinning_error(device: Any) -> str:
    """Page-lock a little of /dev/shm as the server's pool would be; the reason if it is refused."""
    import numpy as np

    from lmcache_mp_safe.contract import SHARED_MEMORY
    from lmcache_mp_safe.ops.device import DeviceError

    with tempfile.TemporaryFile(dir=SHARED_MEMORY) as file:
        os.posix_fallocate(file.fileno(), 0, _PINNED_BYTES)
        memory = np.frombuffer(mmap.mmap(file.fileno(), _PINNED_BYTES), dtype=np.uint8)
        address = int(memory.ctypes.data)
        try:
            device.register(address, _PINNED_BYTES)
            device.unregister(address)
        except DeviceError as error:
            return str(error)
    return ""


def _stock_ops_error() -> str:
    """Loading LMCache's compiled CUDA operations, which it does itself with no more than a warning if it fails."""
    try:
        import lmcache.cuda_ops  # noqa: F401
    except ImportError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
