"""The model and the engine's settings, as vLLM makes them out of its arguments."""

from __future__ import annotations

from collections.abc import Iterator

from lmcache_mp_safe.doctor.facts import Engine, Facts, Group, Model
from lmcache_mp_safe.doctor.findings import Finding, ok, problem, warning


def check(facts: Facts) -> Iterator[Finding]:
    probe = facts.probe
    if probe.host is None:
        return
    if not facts.arguments:
        yield warning(
            "no-model",
            "no model was given: KV cache groups, speculation and connector were not looked at",
            "lmcache-mp-safe doctor -- MODEL, with all arguments of `vllm serve`",
        )
        return
    if probe.usage_error:
        yield problem("arguments", f"vLLM refuses the arguments: {probe.failure}", "give those of `vllm serve`")
        return
    if probe.engine is not None:
        yield from _engine(probe.engine)
        if probe.model is not None:
            yield from _model(probe.engine, probe.model)
        yield _speculation(probe.engine, probe.model)
    if probe.failed_at in ("configuration", "KV cache groups"):
        yield warning(
            "not-found-out",
            f"could not be found out here: {probe.failed_at}: {probe.failure}",
            "run doctor where vLLM runs; vLLM's own start-up log has the KV cache groups too",
        )


def _engine(engine: Engine) -> Iterator[Finding]:
    ranks = f"{engine.tensor_ranks} x {engine.pipeline_ranks} ranks (tensor x pipeline)"
    yield ok("engine", f"{engine.architecture}, {engine.dtype}, {engine.max_model_len:,} tokens, {ranks}")
    if not engine.prefix_caching:
        yield problem(
            "prefix-caching-off",
            "prefix caching is off: this connector stores what vLLM's prefix cache would serve, and refuses to start",
            "start vLLM with --enable-prefix-caching",
        )
    if engine.is_hybrid and engine.mamba_cache_mode not in ("align", "all"):
        yield problem(
            "mamba-cache-mode",
            f"mamba_cache_mode is {engine.mamba_cache_mode!r}: states of the recurrent layers are not kept at block"
            " boundaries, so no prefix can be resumed",
            "start vLLM with --mamba-cache-mode align",
        )
    elif engine.is_hybrid:
        yield ok("mamba-cache-mode", f"mamba_cache_mode is {engine.mamba_cache_mode}")


def _model(engine: Engine, model: Model) -> Iterator[Finding]:
    for number, group in enumerate(model.groups):
        yield ok("kv-group", f"KV group {number}: {_described(group)}")
    if model.refusal:
        yield problem("refused", f"this connector refuses the start: {model.refusal}", "see the message")
        return
    about = "about " if engine.pipeline_ranks > 1 else ""
    yield ok(
        "chunk",
        f"scheduler block {model.block_tokens} tokens, chunk {model.chunk_tokens} tokens,"
        f" object {about}{model.object_bytes / 2**20:.2f} MiB",
    )


def _described(group: Group) -> str:
    kind = group.kind or "not supported"
    span = f" of {group.span_tokens} tokens" if group.span_tokens else ""
    return (
        f"{kind}{span} ({group.spec}), {group.block_tokens} tokens a block, {group.layers} layer(s),"
        f" {group.page_bytes / 2**20:.2f} MiB a block and rank"
    )


def _speculation(engine: Engine, model: Model | None) -> Finding:
    if not engine.speculation:
        return ok("speculation", "speculation off")
    text = f"speculation {engine.speculation}, {engine.draft_tokens} draft tokens; drafts are never stored"
    if engine.drops_last_block:
        block = f" ({model.block_tokens} tokens)" if model is not None and model.block_tokens else ""
        text += f"; hits end one block{block} earlier, as vLLM's own do with a drafter that reads hidden states"
    return ok("speculation", text)
