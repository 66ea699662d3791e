"""vLLM's KV cache tensors as flat buffers and page layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
        ConfigError: a layer's tensors have a layout that is not known, or a layer would be left out: its pages would
            be garbage after a hit.
    """
    _require_every_layer(kv_cache_config, kv_caches)
    num_blocks = int(kv_cache_config.num_blocks)
    buffers: list[torch.Tensor] = []
    groups: list[tuple[Layer, ...]] = []
    for group, kind in zip(kv_cache_config.kv_cache_groups, geometry.groups, strict=True):
        names = [] if kind.kind is GroupKind.IGNORED else group.layer_names
        layers = [_layer(name, kv_caches[name], group.kv_cache_spec, num_blocks, buffers) for name in names]
        groups.append(_without_shared(layers))
    if not buffers:
        raise ConfigError("vLLM registered no KV cache for any layer of this rank")
    return PageLayout(tuple(groups), num_blocks), buffers


def _require_every_layer(kv_cache_config: Any, kv_caches: Mapping[str, Any]) -> None:
    """Each layer of a group has a cache, and each cache belongs to a group or is that of a layer that does."""
    grouped = [name for group in kv_cache_config.kv_cache_groups for name in group.layer_names]
    missing = [name for name in grouped if name not in kv_caches]
    if missing:
        raise ConfigError(f"vLLM registered no KV cache for {', '.join(missing)}")
    known = {_place(kv_caches[name]) for name in grouped}
    strangers = [name for name, cache in kv_caches.items() if name not in grouped and _place(cache) not in known]
    if strangers:
        raise ConfigError(f"the KV caches of {', '.join(strangers)} belong to no KV cache group of vLLM")


def _place(cache: Any) -> tuple[Any, ...]:
    """Equal for layers that share one cache."""
    return tuple((tensor.data_ptr(), tuple(tensor.shape), tensor.stride()) for tensor in _tensors(cache))


def _layer(name: str, cache: Any, spec: Any, num_blocks: int, buffers: list[torch.Tensor]) -> Layer:
    views = [_view(tensor, buffers) for tensor in _tensors(cache)]
    layer = layer_pages(name, views, num_blocks, _page_bytes(spec, name))
    for segment in layer.segments:
        end = segment.offset + (num_blocks - 1) * segment.stride + segment.length
        if end > buffers[segment.buffer].numel():
            raise ConfigError(
                f"the pages of layer {name} would end at byte {end} of a KV cache of"
                f" {buffers[segment.buffer].numel()} bytes: its layout is not known (shapes"
                f" {[view.shape for view in views]}, strides {[view.strides for view in views]} bytes)"
            )
    return layer


def _tensors(cache: Any) -> list[torch.Tensor]:
    if isinstance(cache, list | tuple):
        return [tensor for part in cache for tensor in _tensors(part)]
    return [cache]


def _page_bytes(spec: Any, layer: str) -> int:
    per_layer = getattr(spec, "kv_cache_specs", None)
    return int((per_layer[layer] if isinstance(per_layer, dict) else spec).page_size_bytes)


def _view(tensor: torch.Tensor, buffers: list[torch.Tensor]) -> TensorView:
    """Describe the tensor; its storage becomes a buffer unless it is one already."""
    size = tensor.element_size()
    return TensorView(
        buffer=_buffer_of(tensor, buffers),
        offset=tensor.storage_offset() * size,
        shape=tuple(tensor.shape),
        strides=tuple(stride * size for stride in tensor.stride()),
        itemsize=size,
        dtype=str(tensor.dtype),
    )


def _buffer_of(tensor: torch.Tensor, buffers: list[torch.Tensor]) -> int:
    storage = tensor.untyped_storage()
    for number, known in enumerate(buffers):
        if known.untyped_storage().data_ptr() == storage.data_ptr():
            return number
    buffers.append(torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage))
    return len(buffers) - 1


def _without_shared(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Layers that read another layer's cache have no pages of their own."""
    seen: set[Any] = set()
    own: list[Layer] = []
    for layer in layers:
        if layer.segments not in seen:
            seen.add(layer.segments)
            own.append(layer)
    return tuple(own)
