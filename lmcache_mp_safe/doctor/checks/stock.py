"""What LMCache's own connector does in this configuration: cases from public reports and from tests of this project."""

from __future__ import annotations

from collections.abc import Iterator

from lmcache_mp_safe.doctor.checks.connector import POLICY
from lmcache_mp_safe.doctor.facts import ConnectorKind, Engine, Facts, Host, Model, ServerConfig
from lmcache_mp_safe.doctor.findings import Finding, ok, problem, warning

_SWITCH = "use LMCacheMPSafeConnector instead: docs/migrate.md"


def check(facts: Facts) -> Iterator[Finding]:
    engine, host, model = facts.probe.engine, facts.probe.host, facts.probe.model
    if engine is None or host is None or engine.connector.kind is not ConnectorKind.STOCK:
        return
    yield ok("stock", "the arguments ask for LMCacheMPConnector, LMCache's own connector")
    recurrent = engine.is_hybrid or (model is not None and model.is_recurrent)
    if recurrent:
        yield from _recurrent(engine, host)
    yield from _failed_loads(engine, host, model)
    yield from _server(facts, recurrent)
    yield from _copies(facts, host)
    if engine.connector.settings_error:
        yield warning(
            "stock-settings",
            f"to change to this connector: {engine.connector.settings_error}",
            "docs/migrate.md goes through the options",
        )


def _recurrent(engine: Engine, host: Host) -> Iterator[Finding]:
    if not host.asks_capability:
        yield problem(
            "stock-divergent-hits",
            f"vLLM {host.vllm} lets the attention hit of a hybrid model run deeper than its recurrent state as soon as"
            " any connector is attached: wrong answers, also with nothing loaded (vLLM issue 53505)",
            _SWITCH,
        )
    if engine.speculation:
        yield problem(
            "stock-speculation",
            f"a hybrid model with {engine.speculation} speculation: the blocks that drafts write into are moved and"
            " reused while the stock connector still names them by position, so a wrong recurrent state may be stored"
            " and served; nothing is logged (LMCache issue 4984)",
            _SWITCH,
        )
    yield problem(
        "stock-state-race",
        "vLLM frees the recurrent states of a running request about two steps after it left them; the stock connector"
        " holds nothing while the server copies, so a slow server stores what another request wrote there",
        _SWITCH,
    )
    if host.device == "cpu":
        yield problem(
            "stock-cpu-state",
            "on a CPU the stock connector does not write loaded recurrent states back: every hit is wrong",
            _SWITCH,
        )


def _failed_loads(engine: Engine, host: Host, model: Model | None) -> Iterator[Finding]:
    several = model is not None and len(model.groups) > 1
    if several and not host.reports_failed_loads:
        yield problem(
            "stock-load-failure-kills",
            f"vLLM {host.vllm} has no way to report a failed load on a model with several KV cache groups: one lost"
            " entry ends the engine",
            _SWITCH,
        )
    elif engine.connector.load_failure_policy != "recompute":
        yield warning(
            "stock-load-failure-policy",
            f"kv_load_failure_policy is {engine.connector.load_failure_policy!r}: an entry that the server lost fails"
            " its request",
            f"give {POLICY} in --kv-transfer-config",
        )


def _server(facts: Facts, recurrent: bool) -> Iterator[Finding]:
    server, model = facts.server, facts.probe.model
    if server is None or server.chunk_tokens is None:
        return
    if recurrent:
        yield from _object_groups(server.config)
    if model is None or not model.block_tokens:
        return
    chunk, block = server.chunk_tokens, model.block_tokens
    if chunk % block:
        yield problem(
            "stock-chunk-size",
            f"the server's chunk of {chunk} tokens is no multiple of vLLM's scheduler block of {block}: the stock"
            " connector refuses the start (this one does not need it)",
            f"start the server with --chunk-size {-(-chunk // block) * block}",
        )
    elif model.recurrent_block_tokens and chunk > model.recurrent_block_tokens:
        yield problem(
            "stock-chunk-states",
            f"a chunk of {chunk} tokens covers {chunk // model.recurrent_block_tokens} recurrent blocks: the stock"
            " connector may store a chunk whose last state is missing",
            f"start the server with --chunk-size {model.recurrent_block_tokens}",
        )


def _object_groups(config: ServerConfig | None) -> Iterator[Finding]:
    remedy = "start the server with --separate-object-groups"
    if config is None:
        yield warning(
            "stock-object-groups-unknown",
            "whether the server runs with --separate-object-groups could not be read; without it the stock connector"
            " stores missing recurrent states together with the attention part",
            f"give --server-http-url, or {remedy}",
        )
    elif not config.separate_object_groups:
        yield problem(
            "stock-object-groups",
            "the server runs without --separate-object-groups: the stock connector stores missing recurrent states"
            " together with the attention part, and serves them",
            remedy,
        )


def _copies(facts: Facts, host: Host) -> Iterator[Finding]:
    copies = facts.probe.copies
    if copies is None or host.device != "cuda" or not copies.stock_ops_error:
        return
    yield problem(
        "stock-cuda-ops",
        f"LMCache's compiled operations do not load under torch {facts.software.torch} ({copies.stock_ops_error}): it"
        " logs one warning and goes on with a fallback that returns wrong bytes on CUDA",
        "install an LMCache that was built for this torch, or use this connector, which uses none of LMCache's copies",
    )
