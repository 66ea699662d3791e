"""The connector's settings: one frozen object, read once from `kv_connector_extra_config`.

Keys that the stock connector has keep their names and meaning; ours are under `lmcache.mp.safe.`. An unknown key or a
wrong type stops the start, because a setting that is silently ignored is found out in production.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Any

from lmcache_mp_safe.contract import Integrity
from lmcache_mp_safe.errors import ConfigError

STOCK = "lmcache.mp."
OURS = "lmcache.mp.safe."

# A request may say how many of its tokens are stored at most.
MAX_OFFLOAD_TOKENS = "lmcache.max_offload_tokens"

_MIB = 2**20

# Starts a server that this connector can use.
SERVER_COMMAND = (
    "lmcache server --host 0.0.0.0 --port 5555 --l1-size-gb N --eviction-policy LRU"
    " --shm-name lmcache --no-l1-use-lazy --supported-transfer-mode auto"
)

# Keys of the stock connector that have no meaning here, and why.
_STOCK_ONLY = {
    "autostart": "start the server yourself with `lmcache server`",
    "autostart.server_args": "start the server yourself with `lmcache server`",
    "autostart.wait_timeout": "lmcache.mp.safe.connect_timeout_s is how long the start waits for the server",
    "hash_algorithm": "objects are named by this connector, not by the server's hash of the user's tokens",
    "isolated_ipc": "this connector uses no CUDA IPC; server and vLLM share /dev/shm",
    "use_vmm_api": "this connector uses no CUDA IPC",
    "lazy_offload": "stores are always asynchronous here",
    "lazy_offload_policy": "stores are always asynchronous here",
    "lazy_offload_threshold": "stores are always asynchronous here",
    "lazy_offload_select_count": "stores are always asynchronous here",
    "lazy_offload_horizon_steps": "stores are always asynchronous here",
    "lazy_offload_max_drain_per_step": "stores are always asynchronous here",
    "lazy_offload_max_deferral_seconds": "stores are always asynchronous here",
    "mp_transfer_mode": "this connector always uses engine-driven transfer over shared memory",
    "transfer_intermediate_tensors": "it is not supported",
    "nonblocking_lookup_status": "lookups never block here",
}


@dataclass(frozen=True)
class SafeConfig:
    """Settings of one connector.

    Attributes:
        server_url: address of the LMCache server, `tcp://host:port`.
        call_timeout_s: deadline of one call to the server; past it the call counts as failed.
        heartbeat_s: seconds between registrations, which serve as heartbeat.
        eager_prefetch: look a request up when it arrives instead of when it is first scheduled.
        save_decode_cache: also store what decoding computed, not only the prompt.
        chunk_tokens: lower bound of the chunk length; rounded up to a multiple of vLLM's scheduler block.
        integrity: what is checked before loaded bytes are used.
        lookup_timeout_s: a request whose lookup takes longer is computed without the cache.
        max_probes: resume points tried for one request, beyond those this process remembers.
        pin_fraction: share of the KV cache blocks that unfinished stores may keep from being reused.
        call_bytes: a reservation asks the server for at most this many bytes, for it grants all or nothing; and for no
            more than a sixteenth of its pool.
        lease_s: a reservation older than this is abandoned; keep it well below the server's write lock time (600 s).
        hold_s: a promised hit that vLLM has not admitted after this time is released and looked up again.
        weights_id: names the weights, so that `reset_cache` after a weight update may keep sharing.
        backend: how pages are copied: `auto`, or the name of one backend (`csrc`, `cupy`, `reference`), which then must
            work.
        staging_bytes: GPU memory a rank spends on gathering short pages; `lmcache.mp.safe.staging_mib`.
        require_server: whether vLLM's start fails when the server cannot be used at that moment.
        connect_timeout_s: how long the start waits for the server.
    """

    server_url: str = "tcp://localhost:5555"
    call_timeout_s: float = 10.0
    heartbeat_s: float = 10.0
    eager_prefetch: bool = False
    save_decode_cache: bool = False
    chunk_tokens: int = 256
    integrity: Integrity = Integrity.CHECKSUM
    lookup_timeout_s: float = 3.0
    max_probes: int = 16
    pin_fraction: float = 0.25
    call_bytes: int = 2048 * _MIB
    lease_s: float = 60.0
    hold_s: float = 60.0
    weights_id: str = ""
    backend: str = "auto"
    staging_bytes: int = 48 * _MIB
    require_server: bool = True
    connect_timeout_s: float = 10.0


def _boolean(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{key} must be true or false, not {value!r}")
    return value


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{key} must be a string, not {value!r}")
    return value


def _seconds(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise ConfigError(f"{key} must be a number of seconds above 0, not {value!r}")
    return float(value)


def _whole(low: int, high: int) -> Callable[[str, Any], int]:
    def parse(key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ConfigError(f"{key} must be a whole number from {low} to {high}, not {value!r}")
        return value

    return parse


def _mebibytes(low: int, high: int) -> Callable[[str, Any], int]:
    def parse(key: str, value: Any) -> int:
        return _whole(low, high)(key, value) * _MIB

    return parse


def _fraction(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(f"{key} must be above 0 and at most 1, not {value!r}")
    return float(value)


def _integrity(key: str, value: Any) -> Integrity:
    try:
        return Integrity(value)
    except ValueError:
        raise ConfigError(f"{key} must be one of {[i.value for i in Integrity]}, not {value!r}") from None


# key -> (field, parser). `host`, `port` and `server_urls` make one field together.
_KEYS: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    STOCK + "mq_timeout": ("call_timeout_s", _seconds),
    STOCK + "heartbeat_interval": ("heartbeat_s", _seconds),
    STOCK + "eager_prefetch": ("eager_prefetch", _boolean),
    STOCK + "save_decode_cache": ("save_decode_cache", _boolean),
    OURS + "chunk_tokens": ("chunk_tokens", _whole(1, 1 << 20)),
    OURS + "integrity": ("integrity", _integrity),
    OURS + "lookup_timeout_s": ("lookup_timeout_s", _seconds),
    OURS + "max_probes": ("max_probes", _whole(0, 1024)),
    OURS + "pin_fraction": ("pin_fraction", _fraction),
    OURS + "call_bytes": ("call_bytes", _whole(4096, 1 << 40)),
    OURS + "lease_s": ("lease_s", _seconds),
    OURS + "hold_s": ("hold_s", _seconds),
    OURS + "weights_id": ("weights_id", _text),
    OURS + "backend": ("backend", _text),
    OURS + "staging_mib": ("staging_bytes", _mebibytes(1, 4096)),
    OURS + "require_server": ("require_server", _boolean),
    OURS + "connect_timeout_s": ("connect_timeout_s", _seconds),
}
_ADDRESS_KEYS = (STOCK + "host", STOCK + "port", STOCK + "server_urls")


def parse_config(extra: Mapping[str, Any]) -> SafeConfig:
    """Read `kv_connector_extra_config`.

    Raises:
        ConfigError: a key is unknown or its value has the wrong type or range; the message names the key.
    """
    values: dict[str, Any] = {"server_url": server_url(extra)}
    for key, value in extra.items():
        if key in _ADDRESS_KEYS:
            continue
        if key not in _KEYS:
            raise ConfigError(_unknown_key(key))
        field, parse = _KEYS[key]
        values[field] = parse(key, value)
    assert values.keys() <= {field.name for field in dataclass_fields(SafeConfig)}
    return SafeConfig(**values)


def _unknown_key(key: str) -> str:
    name = key.removeprefix(STOCK)
    if key.startswith(STOCK) and name in _STOCK_ONLY:
        return f"kv_connector_extra_config: remove {key}: {_STOCK_ONLY[name]}"
    known = [*_KEYS, *_ADDRESS_KEYS]
    close = difflib.get_close_matches(key, known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known keys: {', '.join(sorted(known))}"
    return f"kv_connector_extra_config: unknown key {key!r}; {hint}"


def server_url(extra: Mapping[str, Any]) -> str:
    """Address of the one server that `kv_connector_extra_config` names; the stock connector's keys mean the same.

    Raises:
        ConfigError: there is none, or there are several.
    """
    urls_key = STOCK + "server_urls"
    urls = extra.get(urls_key)
    if urls is not None:
        parts = urls.split(",") if isinstance(urls, str) else urls
        if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
            raise ConfigError(f"{urls_key} must be a list of addresses or one comma-separated string, not {urls!r}")
        addresses = [part.strip() for part in parts if part.strip()]
        if len(addresses) != 1:
            raise ConfigError(f"{urls_key} names {len(addresses)} servers; this connector uses exactly one")
        return _with_scheme(urls_key, addresses[0])
    host = _text(STOCK + "host", extra.get(STOCK + "host", "tcp://localhost"))
    port = _whole(1, 65535)(STOCK + "port", extra.get(STOCK + "port", 5555))
    return f"{_with_scheme(STOCK + 'host', host)}:{port}"


def _with_scheme(key: str, address: str) -> str:
    """The address, `tcp://` where it names no transport.

    Raises:
        ConfigError: a transport other than ZMQ's.
    """
    if "://" not in address:
        return f"tcp://{address}"
    if not address.startswith(("tcp://", "ipc://")):
        raise ConfigError(f"{key} is {address!r}: this connector speaks ZMQ only; use tcp:// or ipc://")
    return address
