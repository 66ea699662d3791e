"""One vLLM engine in a process of its own: reads commands, one JSON object a line, and answers each with one.

    python -m benchmarks.engine_child '{"model": DIR, "block_size": N, "kv_transfer_config": {...} or null, ...}'

Several can live on one GPU; they are asked in turn, so that none disturbs another and a drift hits all alike.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import traceback
from typing import Any

ANSWER = "@answer "
_SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "HF_HUB_OFFLINE": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


def first_choice_only() -> None:
    """Triton kernels take their first configuration: fewer compilations, and the same kernels in every process."""
    import triton

    autotune = triton.autotune
    triton.autotune = lambda configs, *arguments, **named: autotune(configs[:1], *arguments, **named)


class Engine:
    """Answers commands; each method is one."""

    def __init__(self, options: dict[str, Any]) -> None:
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        first_choice_only()
        from vllm import LLM

        self._llm: Any = LLM(**{name: value for name, value in options.items() if value is not None})
        self._engine = self._llm.llm_engine
        self._numbers = 0
        self._lengths: dict[str, int] = {}

    def about(self) -> dict[str, Any]:
        cache = self._engine.vllm_config.cache_config
        return {"block_size": cache.block_size, "gpu_blocks": cache.num_gpu_blocks}

    def generate(self, seed: int, tokens: int) -> dict[str, Any]:
        """Time to the first token of a prompt that the seed decides."""
        prompt = _prompt(seed, tokens)
        begin = time.perf_counter()
        request = self._add(prompt, 1)
        while True:
            for output in self._engine.step():
                if output.request_id == request and output.finished:
                    seconds = time.perf_counter() - begin
                    return {
                        "seconds": seconds,
                        "cached": output.num_cached_tokens or 0,
                        "token": output.outputs[0].token_ids[0],
                    }

    def reset(self, limit_s: float = 20.0) -> dict[str, Any]:
        """Empty vLLM's prefix cache, once every store has let go of its blocks."""
        begin = time.perf_counter()
        while not self._llm.reset_prefix_cache():
            if time.perf_counter() - begin > limit_s:
                raise RuntimeError("blocks are still held")
            self._engine.step()
            time.sleep(0.002)
        return {"seconds": time.perf_counter() - begin}

    def start_decoding(self, seed: int, requests: int, tokens: int) -> dict[str, Any]:
        """Start requests that go on for so many tokens; `decode` counts theirs."""
        running = {self._add(_prompt(seed + i, 64), tokens) for i in range(requests)}
        self._lengths = dict.fromkeys(running, 0)
        while not all(self._lengths.values()):
            self._step()
        return {}

    def decode(self, seed: int, cycles: int, every: int, prefill_tokens: int) -> dict[str, Any]:
        """Output tokens a second of them, while a cycle of so many steps begins with a new prompt."""
        before = sum(self._lengths.values())
        steps: list[float] = []
        for number in range(cycles * every):
            begin = time.perf_counter()
            if number % every == 0:
                self._add(_prompt(seed + number, prefill_tokens), 1)
            self._step()
            steps.append(time.perf_counter() - begin)
        return {
            "tokens_per_s": (sum(self._lengths.values()) - before) / sum(steps),
            "median_step_ms": sorted(steps)[len(steps) // 2] * 1e3,
        }

    def stop_decoding(self) -> dict[str, Any]:
        self._engine.abort_request(list(self._lengths))
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return {}

    def _step(self) -> None:
        for output in self._engine.step():
            if output.request_id in self._lengths:
                self._lengths[output.request_id] = len(output.outputs[0].token_ids)

    def _add(self, prompt: list[int], tokens: int) -> str:
        from vllm import SamplingParams

        self._numbers += 1
        request = f"bench-{self._numbers}"
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        self._engine.add_request(request, {"prompt_token_ids": prompt}, sampling)
        return request


def _prompt(seed: int, tokens: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(5, 500) for _ in range(tokens)]


def main() -> None:
    def answer(content: dict[str, Any]) -> None:
        print(f"{ANSWER}{json.dumps(content)}", flush=True)

    try:
        engine = Engine(json.loads(sys.argv[1]))
        answer(engine.about())
        for line in sys.stdin:
            command = json.loads(line)
            answer(getattr(engine, command.pop("do"))(**command))
    except BaseException:
        answer({"error": traceback.format_exc()})
    finally:
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
