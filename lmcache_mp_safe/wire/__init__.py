"""Everything that is said to the LMCache server: its own client behind deadlines, epochs and lock accounting.

Knows no request phase and no tensor of the model.
"""

from __future__ import annotations

from lmcache_mp_safe.wire.config import WireConfig
from lmcache_mp_safe.wire.events import (
    CallFailed,
    CallId,
    Committed,
    Connected,
    FailureKind,
    LookupAnswered,
    Lost,
    Reserved,
    Retrieved,
    SessionEvent,
    SessionId,
    WireEvent,
)
from lmcache_mp_safe.wire.wire import Held, Wire

__all__ = [
    "CallFailed",
    "CallId",
    "Committed",
    "Connected",
    "FailureKind",
    "Held",
    "LookupAnswered",
    "Lost",
    "Reserved",
    "Retrieved",
    "SessionEvent",
    "SessionId",
    "Wire",
    "WireConfig",
    "WireEvent",
]
