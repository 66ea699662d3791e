"""What `vllm serve` would make of its arguments: the engine's configuration and the KV cache groups, without weights.

vLLM knows a model's KV cache groups only from its layers, so the layers are built on torch's `meta` device, where a
tensor has a shape and no memory; then vLLM's own functions decide block sizes and groups, as at a real start. This
takes over process-wide state of vLLM: use a process for it.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config, set_current_vllm_config
from vllm.distributed import get_tp_group, init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.cli.serve import FlexibleArgumentParser, ServeSubcommand
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.core import kv_cache_utils, single_type_kv_cache_manager

if TYPE_CHECKING:
    from argparse import Namespace

    from vllm.v1.kv_cache_interface import KVCacheConfig

# Pages are counted, never allocated: enough of them that no model is refused for want of memory.
_MEMORY_BYTES = 1 << 50


def parse_serve_arguments(arguments: Sequence[str]) -> Namespace:
    """Parse what stands behind `vllm serve`, by vLLM's own parser.

    Raises:
        SystemExit: with status 2, as vLLM does; what is wrong stands on stderr.
    """
    parser = FlexibleArgumentParser(prog="vllm")
    ServeSubcommand().subparser_init(parser.add_subparsers(dest="subparser"))
    parsed: Namespace = parser.parse_args(["serve", *arguments])
    if getattr(parsed, "model_tag", None) is not None:
        parsed.model = parsed.model_tag
    return parsed


def engine_config(parsed: Namespace) -> VllmConfig:
    """The configuration that vLLM would start with. Raises whatever vLLM raises for one that it refuses."""
    return AsyncEngineArgs.from_cli_args(parsed).create_engine_config()


def kv_cache_config_of(vllm_config: VllmConfig) -> KVCacheConfig:
    """The KV cache groups of all pipeline stages, with the page sizes of the first tensor rank.

    Raises whatever vLLM raises; a few models need the values of a tensor while they are built, and fail here.
    """
    _pretend_to_be_the_first_rank(int(vllm_config.parallel_config.tensor_parallel_size))
    with set_current_vllm_config(vllm_config):
        _build_layers(vllm_config)
        current_platform.update_block_size_for_backend(vllm_config)
        specs = _layer_specs(vllm_config)
        if hasattr(single_type_kv_cache_manager, "register_all_kvcache_specs"):
            single_type_kv_cache_manager.register_all_kvcache_specs(vllm_config)
        _resolve_layout(vllm_config, specs)
        (config,) = kv_cache_utils.get_kv_cache_configs(vllm_config, [specs], [_MEMORY_BYTES])
    return kv_cache_utils.generate_scheduler_kv_cache_config([config])


def layer_counts(kv_cache_config: KVCacheConfig) -> list[int]:
    return [len(group.layer_names) for group in kv_cache_config.kv_cache_groups]


def group_page_bytes(kv_cache_config: KVCacheConfig) -> tuple[int, ...]:
    """Bytes of one block of each group, all its layers together, on one tensor rank."""
    sizes = []
    for group in kv_cache_config.kv_cache_groups:
        spec = group.kv_cache_spec
        per_layer: Mapping[str, Any] = getattr(spec, "kv_cache_specs", None) or {}
        layers = [per_layer.get(name, spec) for name in group.layer_names]
        sizes.append(sum(int(layer.page_size_bytes) for layer in layers))
    return tuple(sizes)


def _pretend_to_be_the_first_rank(tensor_ranks: int) -> None:
    """Layers only ask how many ranks share them. Nobody else is there, so nothing may be sent; nothing is."""
    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{Path(folder) / 'store'}", local_rank=0, backend="gloo")
        initialize_model_parallel(1, 1)
    get_tp_group().world_size = tensor_ranks


def _build_layers(vllm_config: VllmConfig) -> None:
    with set_default_torch_dtype(vllm_config.model_config.dtype), torch.device("meta"):
        initialize_model(vllm_config=vllm_config)
        speculative = vllm_config.speculative_config
        if speculative is None:
            return
        if speculative.use_eagle():
            initialize_model(vllm_config=vllm_config, model_config=speculative.draft_model_config)
        elif speculative.uses_draft_model():
            initialize_model(vllm_config=vllm_config, model_config=speculative.draft_model_config, prefix="draft_model")


def _layer_specs(vllm_config: VllmConfig) -> dict[str, Any]:
    """As the worker's `get_kv_cache_spec`: one spec for each layer that has a cache of its own."""
    layers = get_layers_from_vllm_config(vllm_config, AttentionLayerBase)
    worker: Any = importlib.import_module("vllm.v1.worker.utils")
    customize = getattr(worker, "customize_attention_spec", None)  # 0.32 and newer
    attention_spec: Any = importlib.import_module("vllm.v1.kv_cache_interface").AttentionSpec
    specs = {}
    for name, layer in layers.items():
        if getattr(layer, "kv_sharing_target_layer_name", None):
            continue
        spec = layer.get_kv_cache_spec(vllm_config)
        if spec is None:
            continue
        if customize is not None and isinstance(spec, attention_spec):
            spec = customize(layer.get_attn_backend(), spec)
        specs[name] = spec
    return specs


def _resolve_layout(vllm_config: VllmConfig, specs: Mapping[str, Any]) -> None:
    """0.32 and newer settle the memory layout before they form groups."""
    backends: Any = importlib.import_module("vllm.v1.attention.backends.utils")
    if not hasattr(backends, "resolve_kv_cache_layout"):
        return
    connectors: Any = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.utils")
    supported = backends.get_supported_kv_cache_layouts(connectors.get_current_attn_backends(vllm_config))
    backends.resolve_kv_cache_layout(vllm_config, [[layout.name for layout in supported]], list(specs.values()))
