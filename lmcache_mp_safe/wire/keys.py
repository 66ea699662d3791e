"""LMCache's own request objects, filled the way this package uses them."""

from __future__ import annotations

import msgspec
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey, RegisterEngineDrivenContextPayload

_ROW_BYTES = 4096


def object_key(
    namespace: str, session: str, salt: str, tokens: msgspec.Raw | tuple[int, ...], start: int, end: int
) -> IPCCacheServerKey:
    """A key for the objects whose tokens are [start, end) of the sequence.

    Args:
        tokens: the sequence from 0 to `end`: the server hashes it chunk by chunk from its beginning. Fewer ints than a
            chunk may follow. The chunk hashes ignore them, but the server keeps its record of an open operation under
            the whole key: a suffix of its own gives each operation a record of its own, so a retry cannot overwrite an
            open range and two loads of one range need not take turns.
    """
    return IPCCacheServerKey(
        model_name=namespace,
        world_size=1,  # one object holds the slices of all ranks
        worker_id=0,
        token_ids=tokens,
        start=start,
        end=end,
        request_id=session,
        cache_salt=salt,
        num_kv_readers=1,
    )


def registration(instance: int, namespace: str, object_bytes: int) -> RegisterEngineDrivenContextPayload:
    """Registers a layout of one flat uint8 object of this size for each chunk."""
    return RegisterEngineDrivenContextPayload(
        instance_id=instance,
        model_name=namespace,
        world_size=1,
        block_size=1,
        num_layers=1,
        hidden_dim_size=_ROW_BYTES,
        dtype_str="uint8",
        use_mla=True,  # without the factor of two for keys and values
        num_physical_slots=object_bytes // _ROW_BYTES,
    )
