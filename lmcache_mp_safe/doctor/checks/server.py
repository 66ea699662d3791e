"""The LMCache server and the memory that it shares."""

from __future__ import annotations

from collections.abc import Iterator

from lmcache_mp_safe.config import SERVER_COMMAND
from lmcache_mp_safe.doctor.facts import ConnectorKind, Facts, Machine, Model, Server, ServerConfig
from lmcache_mp_safe.doctor.findings import Finding, ok, problem, warning

_DOCKER_SHM = 64 << 20  # what a container gets if nobody asks for more
_EVICTS_AT = 0.8  # LMCache's default watermark


def check(facts: Facts) -> Iterator[Finding]:
    yield _shared_memory(facts.machine)
    server = facts.server
    if server is None:
        if facts.software.lmcache:
            yield warning(
                "server-unknown", "the settings name no single server, so none was asked", "give --server-url"
            )
        return
    if server.chunk_tokens is None:
        said = f" ({server.refusal})" if server.refusal else ""
        yield problem(
            "server-absent",
            f"no LMCache server answers at {server.url}{said}: vLLM's start will fail",
            f"start it with: {SERVER_COMMAND}; or set lmcache.mp.safe.require_server to false",
        )
        return
    yield ok("server", f"an LMCache server answers at {server.url}")
    if server.config is not None:
        yield from _config(server.config, facts)
    else:
        yield warning(
            "server-http",
            f"its HTTP interface at {server.http_url} was not read ({server.config_error}): version, flags and free"
            " memory are not known",
            "give --server-http-url; the server needs --http-host and --http-port for it",
        )
    stock = facts.probe.engine is not None and facts.probe.engine.connector.kind is ConnectorKind.STOCK
    yield from _pool(server, stock=stock)
    if server.pool is not None and facts.probe.model is not None and facts.probe.model.object_bytes:
        yield _room(server.pool.size, facts.probe.model)


def _shared_memory(machine: Machine) -> Finding:
    if machine.shm_total is None or machine.shm_free is None:
        return problem("no-shm", "there is no /dev/shm here", "mount one; it holds the server's pool")
    sizes = f"/dev/shm has {_gib(machine.shm_total)}, {_gib(machine.shm_free)} of them free; uid {machine.uid}"
    if machine.shm_total <= _DOCKER_SHM:
        return warning(
            "shm-small",
            f"{sizes}: that is what a container gets when nobody asks for more",
            "docker: --shm-size or --ipc; Kubernetes: an emptyDir of medium Memory at /dev/shm (docs/deploy.md)",
        )
    return ok("shm", sizes)


def _config(config: ServerConfig, facts: Facts) -> Iterator[Finding]:
    version = f"LMCache {config.version}, chunk size {config.chunk_tokens} tokens, {config.gpu_workers} worker(s)"
    beside = facts.software.lmcache
    if beside and config.version != beside:
        yield warning(
            "server-version",
            f"{version}; the LMCache beside vLLM is {beside}",
            "run the same version on both sides",
        )
    else:
        yield ok("server-version", version)
    free = config.pool_bytes - config.used_bytes
    yield ok("pool-room", f"pool of {_gib(config.pool_bytes)}, {_gib(free)} of them free")
    engine = facts.probe.engine
    if engine is not None and engine.data_ranks > config.gpu_workers:
        yield warning(
            "server-workers",
            f"{engine.data_ranks} engines wait for {config.gpu_workers} worker(s) of the server",
            f"start the server with --max-gpu-workers {engine.data_ranks}",
        )


def missing_flags(server: Server) -> list[str]:
    """The flags without which the server does not lend its memory: exactly those that are missing, where it says so."""
    config = server.config
    if config is None:
        return ["--shm-name NAME", "--no-l1-use-lazy", "--supported-transfer-mode auto"]
    missing = []
    if not config.shm_name:
        missing.append("--shm-name NAME")
    if config.lazy:
        missing.append("--no-l1-use-lazy")
    if config.transfer_mode == "lmcache_driven":
        missing.append("--supported-transfer-mode auto")
    return missing


def _pool(server: Server, *, stock: bool) -> Iterator[Finding]:
    if server.pool is not None:
        yield ok(
            "pool", f"it lends its memory: {server.pool.name}, {_gib(server.pool.size)}, mapped here and proven its own"
        )
        return
    lazy = server.config is not None and server.config.lazy
    if lazy:
        yield warning(
            "lazy-l1",
            "the server's pool is lazy: it grows when it is used, and cannot be shared",
            "start the server with --no-l1-use-lazy",
        )
    missing = missing_flags(server)
    if not missing:
        yield problem("pool-unusable", f"its memory cannot be used from here: {server.refusal}", "see the message")
        return
    unsure = "" if server.config is not None else "one or more of "
    make = warning if stock else problem
    yield make(
        "server-flags",
        f"it does not lend its memory, without which this connector refuses the start: {server.refusal}",
        f"start it with {unsure}{' '.join(missing)}",
    )


def _room(pool_bytes: int, model: Model) -> Finding:
    chunks = int(pool_bytes * _EVICTS_AT) // (model.object_bytes * model.objects_per_chunk)
    text = (
        f"the pool holds {chunks * model.chunk_tokens:,} tokens of this model or more before it evicts"
        f" ({model.chunk_tokens} tokens take {model.objects_per_chunk} object(s) at most)"
    )
    if chunks < 2:
        return problem("pool-too-small", text, "raise the server's --l1-size-gb (docs/deploy.md has the arithmetic)")
    return ok("pool-tokens", text)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"
