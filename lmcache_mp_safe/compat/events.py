"""KV cache events as vLLM publishes them, from what the scheduler half has to announce.

As with the stock connector the medium is CPU, the tokens are the request's own, and a block is one of our objects: its
hash is the object's digest, which is the same in every process. A chunk object is a block of C tokens; a boundary
object is one of the tokens since the last whole chunk, or of the last chunk when it ends there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import BlockHash, maybe_convert_block_hash

from lmcache_mp_safe.announcements import News, ObjectStored
from lmcache_mp_safe.compat.requests import HostRequest

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def wants_events(vllm_config: VllmConfig) -> bool:
    """Whether vLLM publishes KV cache events."""
    events = vllm_config.kv_events_config
    return events is not None and bool(events.enable_kv_cache_events)


def events_of(news: Sequence[News]) -> list[KVCacheEvent]:
    return [_stored(one) if isinstance(one, ObjectStored) else _removed(one.digests, one.group) for one in news]


def _stored(stored: ObjectStored) -> BlockStored:
    source = stored.source
    assert isinstance(source, HostRequest)
    keys = source.vllm_extra_keys(stored.start, stored.end)
    return BlockStored(
        block_hashes=[_hash(stored.digest)],
        parent_block_hash=None if stored.parent is None else _hash(stored.parent),
        token_ids=list(source.tokens(stored.start, stored.end)),
        block_size=stored.end - stored.start,
        lora_id=source.lora[0],
        medium=MEDIUM_CPU,
        lora_name=source.lora[1],
        extra_keys=_untagged([keys]),
        group_idx=stored.group,
    )


def _removed(digests: Sequence[bytes], group: int) -> BlockRemoved:
    return BlockRemoved(block_hashes=[_hash(digest) for digest in digests], medium=MEDIUM_CPU, group_idx=group)


def _hash(digest: bytes) -> bytes | int:
    converted: bytes | int = maybe_convert_block_hash(BlockHash(digest))
    return converted


def _untagged(keys: list[Any]) -> Any:
    """Newer versions tag the keys with where they come from, and publish them without."""
    convert = getattr(kv_cache_utils, "to_event_extra_keys", None)
    return keys if convert is None else convert(keys)
