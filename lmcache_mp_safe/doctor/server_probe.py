"""Looks at the LMCache server: `python -m lmcache_mp_safe.doctor.server_probe RESULT URL HTTP_URL STEP_SECONDS`.

It goes the connector's own way: register, map the pool, have the server write 4 KiB there and find them. What cannot be
seen that way (version, flags, what is used) is read from the server's HTTP interface, if it can be reached.
"""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from lmcache_mp_safe.doctor.facts import Pool, Server, ServerConfig
from lmcache_mp_safe.errors import SafeError
from lmcache_mp_safe.wire.connecting import OwnClient, Target, connect

# On the server it is a model's name; the connector's own names end in a digest.
_NAMESPACE = "lmcache-mp-safe-doctor"
_OBJECT_BYTES = 4096


def main(result: Path, url: str, http_url: str, step_s: float) -> None:
    """Each step on the server, and each HTTP request, may take `step_s` seconds."""
    chunk_tokens, pool, refusal = None, None, ""
    try:
        chunk_tokens = _chunk_tokens(url, step_s)
        pool = _pool(url, step_s) if chunk_tokens is not None else None
    except SafeError as error:
        refusal = str(error)
    except Exception as error:  # a URL that is none, for one
        refusal = f"cannot connect to {url}: {error}"
    config, config_error = None, ""
    if chunk_tokens is not None:
        try:
            config = _config(http_url, urlsplit(url).port, step_s)
        except (OSError, ValueError, LookupError, TypeError) as error:
            config_error = str(error) or type(error).__name__
    server = Server(url, http_url, chunk_tokens, pool, refusal, config, config_error)
    result.write_bytes(msgspec.json.encode(server))


def _chunk_tokens(url: str, step_s: float) -> int | None:
    """The server's chunk size, or None if nobody answers."""
    client = OwnClient(url)
    try:
        future = client.get_chunk_size()
        return int(future.result(0)) if future.wait(step_s) else None
    finally:
        client.close()


def _pool(url: str, step_s: float) -> Pool:
    """Raises `ServerError` with what is wrong and what to change."""
    connection = connect(Target(url, _NAMESPACE, _OBJECT_BYTES, step_s))
    try:
        connection.client.unregister_kv_cache_engine_driven_context(connection.instance).wait(step_s)
        return Pool(connection.shm_name, connection.pool.size)
    finally:
        connection.client.close()
        connection.pool.close()


def _config(http_url: str, port: int | None, step_s: float) -> ServerConfig:
    """Read `/config`, `/status` and `/lmc_version`. Raises OSError, ValueError or LookupError if they are not there."""
    config, status = _get(http_url, "config", step_s), _get(http_url, "status", step_s)
    mp, memory = config["mp"], config["storage_manager"]["l1_manager_config"]["memory_config"]
    if mp["port"] != port:
        raise ValueError(f"the LMCache server at {http_url} listens on port {mp['port']}: it is another one")
    pool = status["storage_manager"]["l1_manager"]
    return ServerConfig(
        version=str(_get(http_url, "lmc_version", step_s)),
        transfer_mode=str(mp["supported_transfer_mode"]),
        shm_name=str(mp["shm_name"] or ""),
        lazy=bool(memory["use_lazy"]),
        separate_object_groups=bool(mp["separate_object_groups"]),
        chunk_tokens=int(mp["chunk_size"]),
        gpu_workers=int(mp["max_gpu_workers"]),
        pool_bytes=int(pool["memory_total_bytes"]),
        used_bytes=int(pool["memory_used_bytes"]),
    )


def _get(http_url: str, path: str, step_s: float) -> Any:
    with urllib.request.urlopen(f"{http_url}/{path}", timeout=step_s) as answer:
        return json.loads(answer.read())


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4]))
