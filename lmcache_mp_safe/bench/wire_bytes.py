"""Calls and bytes between one request and its server, against the stock connector's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmcache_mp_safe.bench.installed import missing_packages
from lmcache_mp_safe.bench.runner import Check, Result, Row, WrongBytesError

STEP_TOKENS = 8192
LIMITS = {"hybrid": 0.1, "attention": 0.4}
_DECODE_STEPS = 80


def traffic(shape: Any, side_name: str, length: int, ranks: int, decode_steps: int) -> dict[str, tuple[int, int, int]]:
    """(calls, bytes, hit tokens) of a request that misses and is stored, and of the same prompt sent again.

    Raises:
        WrongBytesError: the second one found nothing, or less than the first one should have stored.
    """
    from lmcache_mp_safe.bench.connectors import OurSide, StockSide
    from lmcache_mp_safe.bench.engine_loop import EngineLoop, prompt
    from lmcache_mp_safe.bench.stub import StubServer

    chunk = 256 if side_name == "ours" else shape.stock_chunk
    server = StubServer(chunk, keeps=True)
    blocks = 64 + 2 * shape.blocks_for(length + 2 * decode_steps)
    side = (OurSide if side_name == "ours" else StockSide)(shape, blocks, STEP_TOKENS, server, ranks)
    engine = EngineLoop(shape, [side], blocks, STEP_TOKENS, length + 2 * decode_steps + 64)
    found: dict[str, tuple[int, int, int]] = {}
    server.notes = True
    for life in ("cold", "hit"):
        server.forget()
        request = engine.add(prompt(length, 0))
        while engine.computing:
            engine.step()
        for _ in range(decode_steps):
            engine.step()
        engine.finish(request)
        engine.drain()
        for _ in range(4):
            engine.step()
        sent = sum(call.sent_bytes + call.answered_bytes for call in server.calls)
        found[life] = len(server.calls), sent, engine.hits.get(request.request_id, 0)
        if not engine.manager.reset_prefix_cache():
            raise WrongBytesError(f"{side_name}: blocks are still held after {life}")
    side.connector.shutdown()
    least = (length - 1) // shape.block_tokens * shape.block_tokens - shape.stock_chunk
    if found["hit"][2] < least:
        raise WrongBytesError(f"{side_name}: a hit of {found['hit'][2]} tokens, at least {least} were stored")
    return found


class WireBytes:
    key = "wire-bytes"
    description = (
        "Calls to the server, and bytes of them and of their answers in LMCache's own encoding, for one prompt of"
        " 100,000 tokens in steps of 8,192: cold (a lookup that misses, then the stores) and again as a hit"
        " (lookup and load), with vLLM's own cache emptied in between. The stock connector's calls are those of"
        " its scheduler and of its workers (real adapters; a store or a load is one call of every rank). The"
        " server's chunk is the default of 256 tokens, but the stock connector cannot serve the hybrid with that:"
        " there its server runs with --chunk-size 1616, the least it accepts. Token ids lie below 65,536: three"
        " bytes each."
    )

    def plot(self, result: Result, path: Path) -> None:
        from lmcache_mp_safe.bench.plots import plot_pairs

        plot_pairs(result, "kB", "kB, stock", path)

    def can_run(self) -> str | None:
        return missing_packages("vllm", "lmcache", "matplotlib")

    def run(self, quick: bool) -> Iterator[Row]:
        from lmcache_mp_safe.bench.shapes import ATTENTION, HYBRID

        length = 6_000 if quick else 100_000
        for shape in (HYBRID, ATTENTION):
            limit = None if quick else LIMITS[shape.name]
            for ranks in (1,) if quick else (1, 4):
                both = {
                    name: traffic(shape, name, length, ranks, 8 if quick else _DECODE_STEPS)
                    for name in ("ours", "stock")
                }
                yield from rows(f"{shape.name}, {length:,} tokens, {ranks} rank{'s' * (ranks > 1)}", limit, both)


def rows(name: str, limit: float | None, both: dict[str, dict[str, tuple[int, int, int]]]) -> Iterator[Row]:
    for life in ("cold", "hit"):
        calls, sent, hit_tokens = both["ours"][life]
        stock_calls, stock_sent, stock_hit = both["stock"][life]
        share = sent / stock_sent
        yield Row(
            f"{name}, {life}",
            {
                "calls": calls,
                "calls, stock": stock_calls,
                "kB": sent / 1e3,
                "kB, stock": stock_sent / 1e3,
                "hit tokens": hit_tokens,
                "hit tokens, stock": stock_hit,
                "bytes of stock's": share,
            },
            () if limit is None else (Check("bytes, of stock's", share, "<=", limit),),
        )
