"""vLLM's KV cache tensors as flat buffers and page layouts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lmcache_mp_safe.errors import ConfigError
from lmcache_mp_safe.geometry.groups import GroupKind, ModelGeometry
from lmcache_mp_safe.geometry.pages import Layer, PageLayout, TensorView, layer_pages


def page_layout(
    kv_cache_config: Any, kv_caches: Mapping[str, Any], geometry: ModelGeometry
) -> tuple[PageLayout, list[torch.Tensor]]:
    """The pages of every group on this rank, and the flat uint8 buffers that they lie in.

    Args:
        kv_cache_config: vLLM's `KVCacheConfig`.
        kv_caches: layer name -> tensor, or list of state tensors, as vLLM registers them with a connector.

    Raises:
        ConfigError: a layer's tensors have a layout that is not known.
    """
    buffers: list[torch.Tensor] = []
    groups: list[tuple[Layer, ...]] = []
    for group, kind in zip(kv_cache_config.kv_cache_groups, geometry.groups, strict=True):
        names = [] if kind.kind is GroupKind.IGNORED else [name for name in group.layer_names if name in kv_caches]
        layers = [
            layer_pages(
                name,
                [_view(tensor, buffers) for tensor in _tensors(kv_caches[name])],
                int(kv_cache_config.num_blocks),
                _page_bytes(group.kv_cache_spec, name),
            )
            for name in names
        ]
        groups.append(_without_shared(layers))
    if not buffers:
        raise ConfigError("vLLM registered no KV cache for any layer of this rank")
    return PageLayout(tuple(groups), int(kv_cache_config.num_blocks)), buffers


def _tensors(cache: Any) -> list[torch.Tensor]:
    if isinstance(cache, list | tuple):
        return [tensor for part in cache for tensor in _tensors(part)]
    return [cache]


def _page_bytes(spec: Any, layer: str) -> int:
    per_layer = getattr(spec, "kv_cache_specs", None)
    return int((per_layer[layer] if isinstance(per_layer, dict) else spec).page_size_bytes)


def _view(tensor: torch.Tensor, buffers: list[torch.Tensor]) -> TensorView:
    """Describe the tensor; its storage becomes a buffer unless it is one already."""
    storage = tensor.untyped_storage()
    for number, known in enumerate(buffers):
        if known.untyped_storage().data_ptr() == storage.data_ptr():
            break
    else:
        number = len(buffers)
        buffers.append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
    size = tensor.element_size()
    return TensorView(
        buffer=number,
        offset=tensor.storage_offset() * size,
        shape=tuple(tensor.shape),
        strides=tuple(stride * size for stride in tensor.stride()),
        itemsize=size,
        dtype=str(tensor.dtype),
    )


def _without_shared(layers: list[Layer]) -> tuple[Layer, ...]:
    """Layers that read another layer's cache have no pages of their own."""
    seen: set[Any] = set()
    own: list[Layer] = []
    for layer in layers:
        if layer.segments not in seen:
            seen.add(layer.segments)
            own.append(layer)
    return tuple(own)
