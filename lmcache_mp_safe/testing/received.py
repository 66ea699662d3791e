"""What a server gets of a call: a fake client hands arguments over through LMCache's own encoder and decoder.

The wire layer sends the tokens of a key encoded, and such a key has no length, no items and no hash.
"""

from __future__ import annotations

from typing import Any

from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.transport.zmq_impl.mq import msgspec_decode, msgspec_encode


def as_received(argument: Any) -> Any:
    """The argument as the server decodes it; only keys change."""
    if not isinstance(argument, IPCCacheServerKey):
        return argument
    return msgspec_decode(msgspec_encode(argument, IPCCacheServerKey), IPCCacheServerKey)
