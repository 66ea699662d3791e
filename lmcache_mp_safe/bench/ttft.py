"""Time to the first token on a real engine and a real server, on CPU: a hit against recomputing."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lmcache_mp_safe.bench.installed import missing_packages
from lmcache_mp_safe.bench.measure import MS
from lmcache_mp_safe.bench.runner import Row, WrongBytesError

LENGTHS = (1_400, 4_000)
_SALT = "bench"


class TimeToFirstToken:
    key = "ttft-cpu"
    description = (
        "Time from a request to its first token on vLLM's CPU engine with the tiny hybrid model, one request at a"
        " time: recomputed, as a hit of vLLM's own prefix cache, and as a hit from the LMCache server with vLLM's"
        " cache emptied before. The model is tiny and computing it is cheap: the figures show what a hit takes,"
        " not what it gains on a model of size."
    )

    def can_run(self) -> str | None:
        return missing_packages("vllm", "lmcache", "torch")

    def run(self, quick: bool) -> Iterator[Row]:
        from lmcache_mp_safe.testing.engine import EngineSpec
        from lmcache_mp_safe.testing.engine_worker import EngineProcess
        from lmcache_mp_safe.testing.models import write_model
        from lmcache_mp_safe.testing.server import LMCacheServer

        folders = tempfile.TemporaryDirectory(prefix="lmcache-mp-safe-bench-")
        with folders as folder, LMCacheServer(l1_size_gb=1) as server:
            spec = EngineSpec(
                str(write_model("hybrid", Path(folder) / "model")),
                connector="safe",
                connector_extra={"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server.port},
            )
            with EngineProcess(spec) as engine:
                for length in LENGTHS[:1] if quick else LENGTHS:
                    yield self._row(engine, length, 2 if quick else 4)

    def _row(self, engine: Any, length: int, repeats: int) -> Row:
        from lmcache_mp_safe.testing.oracle import words

        times: dict[str, list[float]] = {"computed": [], "local hit": [], "external hit": []}
        hit_tokens: list[int] = []
        for repeat in range(repeats):
            prompt = words(random.Random(f"{length} {repeat}"), length)
            tokens = set()
            for way, spent in times.items():
                if way != "local hit":
                    engine.drain()
                    engine.reset_prefix_cache()
                begin = time.perf_counter()
                (answer,) = engine.generate([prompt], max_tokens=1, salts=[_SALT])
                seconds = time.perf_counter() - begin
                tokens.add(tuple(answer.token_ids))
                if way == "external hit":
                    hit_tokens.append(answer.external_tokens)
                elif answer.external_tokens:
                    raise WrongBytesError(f"{way}: {answer.external_tokens} tokens came from the server")
                if repeat:  # the first one warms
                    spent.append(seconds)
            if len(tokens) != 1:
                raise WrongBytesError(f"{length} tokens: a hit gave another token than recomputing")
        if not min(hit_tokens):
            raise WrongBytesError(f"{length} tokens: no external hit")
        middle = {way: statistics.median(spent) * MS for way, spent in times.items()}
        values: dict[str, Any] = {f"{way} ms": value for way, value in middle.items()}
        values["hit tokens"] = min(hit_tokens)
        values["external hit of computed"] = middle["external hit"] / middle["computed"]
        return Row(f"{length:,} tokens", values)
