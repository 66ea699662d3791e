"""Real engines on the GPU: without a connector, with this one, with the stock one, on the same requests in turn.

All three live at once, each in a process of its own (`engine_child.py`), and the idle ones wait. The model is a hybrid
in the shape of Qwen3-Next with 48 layers and random weights; only its speed means anything.
"""

from __future__ import annotations

import contextlib
import json
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.engine_child import ANSWER
from benchmarks.gpu_world import no_gpu
from benchmarks.server import environment
from lmcache_mp_safe.bench.measure import MS, median_and_noise, percentile
from lmcache_mp_safe.bench.runner import Check, Row, say
from lmcache_mp_safe.testing.server import LMCacheServer

NAMES = ("none", "safe", "stock")
POOL_GIB = 6  # two runs of `decode` fill it
KV_GIB = 16
BLOCK = 1088  # tokens: the least multiple of 64 whose attention page is not smaller than a recurrent state
PROMPT = 32 << 10
START_S, ANSWER_S = 170.0, 60.0
DECODERS, EVERY, CYCLES = 8, 8, 2  # requests, steps of a cycle, cycles of a turn
PREFILL = 2 * BLOCK + 32
DECODE_S = 150.0

MODEL: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "dtype": "bfloat16",
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 4096,
    "num_hidden_layers": 48,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "partial_rotary_factor": 0.25,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": False,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.02,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "load_format": "dummy",  # random weights are made on the GPU and never written
    "dtype": "bfloat16",
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [DECODERS]},
    "enable_prefix_caching": True,
    "mamba_cache_mode": "align",
    "mamba_ssm_cache_dtype": "float32",
    "gdn_prefill_backend": "triton",
    "block_size": BLOCK,
    "max_model_len": PROMPT + 2 * BLOCK,
    "max_num_batched_tokens": 4 * BLOCK + 64,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": KV_GIB << 30,
    "gpu_memory_utilization": 0.1,  # without meaning beside the line above, but vLLM wants that much free
    "seed": 0,
}


def transfer(name: str, port: int) -> dict[str, Any] | None:
    """`kv_transfer_config` of one of the engines."""
    extra: dict[str, Any] = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port, "lmcache.mp.mq_timeout": 20}
    if name == "none":
        return None
    connector, module = "LMCacheMPSafeConnector", "lmcache_mp_safe.connector"
    if name == "stock":
        connector, module = "LMCacheMPConnector", "lmcache.integration.vllm.lmcache_mp_connector"
        extra["lmcache.mp.mp_transfer_mode"] = "lmcache_driven"
    return {
        "kv_connector": connector,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


class Child:
    """One engine's process."""

    def __init__(self, options: dict[str, Any], log: Path) -> None:
        self._log = log
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.engine_child", json.dumps(options)],
                cwd=Path(__file__).parents[1],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                self._answers.put(json.loads(line[len(ANSWER) :]))
        self._answers.put({"error": f"the process ended; its log ends\n{self._tail()}"})

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])

    def answer(self, limit_s: float) -> dict[str, Any]:
        """The next answer.

        Raises:
            RuntimeError: there is none in time, or it is an error.
        """
        try:
            answer = self._answers.get(timeout=max(limit_s, 0.0))
        except queue.Empty:
            raise RuntimeError(f"no answer within {limit_s:.0f} s; the log ends\n{self._tail()}") from None
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do} | arguments) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # the reader says why
        return self.answer(ANSWER_S)

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()


class Engines:
    """The three engines and their servers. Started by the first case that needs them; `close` ends them."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._children: dict[str, Child] = {}
        self._started = False
        self.broken: dict[str, str] = {}
        self.gpu_blocks = 0

    def start(self) -> None:
        if self._started:
            return
        self._started = True
        place = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="lmcache_mp_safe_bench_")))
        model = place / "model"
        model.mkdir()
        (model / "config.json").write_text(json.dumps(MODEL))
        flags = ("--supported-transfer-mode", "lmcache_driven", "--separate-object-groups", "--chunk-size", str(BLOCK))
        servers = {
            "safe": LMCacheServer(l1_size_gb=POOL_GIB),
            "stock": LMCacheServer(l1_size_gb=POOL_GIB, shm_name="", flags=flags),
        }
        begin = time.monotonic()
        for name in NAMES:  # they import vLLM while the servers start
            port = servers[name].port if name in servers else 0
            options = OPTIONS | {"model": str(model), "kv_transfer_config": transfer(name, port)}
            self._children[name] = Child(options, place / f"{name}.log")
            self._stack.callback(self._children[name].stop)
        for name, server in servers.items():
            with environment(**({"CUDA_VISIBLE_DEVICES": ""} if name == "safe" else {})):
                self._stack.enter_context(server)
        for name in NAMES:
            about = self._try(name, lambda child: child.answer(begin + START_S - time.monotonic()))
            say(f"    engine {name}: {about or self.broken[name]} after {time.monotonic() - begin:.0f} s")
            if about and about["block_size"] != BLOCK:
                self.broken[name] = f"vLLM made the block size {about['block_size']}"

    def ask(self, name: str, do: str, **arguments: Any) -> dict[str, Any] | None:
        """None from an engine that is broken."""
        return self._try(name, lambda child: child.ask(do, **arguments))

    def _try(self, name: str, act: Any) -> dict[str, Any] | None:
        if name in self.broken:
            return None
        try:
            answer: dict[str, Any] = act(self._children[name])
        except RuntimeError as error:
            say(f"    engine {name} is broken: {error}")
            self.broken[name] = str(error).strip().splitlines()[-1]
            return None
        return answer

    def complain(self) -> None:
        """Raises RuntimeError if an engine is broken."""
        if self.broken:
            raise RuntimeError("; ".join(f"engine {name}: {reason}" for name, reason in self.broken.items()))

    def close(self) -> None:
        self._stack.close()


ENGINES = Engines()


def cannot_run() -> str | None:
    if reason := no_gpu((POOL_GIB + 1) << 30):
        return reason
    return None if find_spec("vllm") else "vllm is not installed"


class TimeToFirstToken:
    key = "ttft"
    description = (
        f"Time to the first token of a prompt of {PROMPT} tokens on a 48-layer hybrid model: recomputed without"
        " a connector, and as an external hit, with vLLM's own prefix cache emptied before each."
    )

    def can_run(self) -> str | None:
        return cannot_run()

    def run(self, quick: bool) -> Iterator[Row]:
        ENGINES.start()
        first: dict[str, list[float]] = {name: [] for name in NAMES}
        hits: dict[str, list[float]] = {name: [] for name in NAMES}
        cached: dict[str, int] = dict.fromkeys(NAMES, 0)
        same: dict[str, int] = dict.fromkeys(NAMES, 0)
        for seed in range(2 if quick else 4):  # the first one compiles and warms
            for name in NAMES:
                miss = ENGINES.ask(name, "generate", seed=seed, tokens=PROMPT)
                again = [self._again(name, seed) for _ in range(1 if name == "none" else 3)]
                if miss is None or None in again or seed == 0:
                    continue
                first[name].append(miss["seconds"])
                found = [hit for hit in again if hit is not None]
                hits[name] += [hit["seconds"] for hit in found]
                cached[name] = min(hit["cached"] for hit in found)
                same[name] += sum(hit["token"] == miss["token"] for hit in found)
        for name in NAMES:
            if first[name] and hits[name]:
                yield self._row(name, first, hits, cached[name], same[name])
        ENGINES.complain()
        for name in ("safe", "stock"):
            if cached[name] < PROMPT - 2 * BLOCK:
                raise RuntimeError(f"engine {name}: a hit of {cached[name]} tokens only")

    def _again(self, name: str, seed: int) -> dict[str, Any] | None:
        ENGINES.ask(name, "reset")
        time.sleep(0.2)  # the stock server acknowledges a store before a lookup sees it
        return ENGINES.ask(name, "generate", seed=seed, tokens=PROMPT)

    def _row(
        self, name: str, first: dict[str, list[float]], hits: dict[str, list[float]], cached: int, same: int
    ) -> Row:
        middle = statistics.median
        values: dict[str, Any] = {"computed and stored ms": middle(first[name]) * MS}
        if name == "none":
            values = {"computed ms": middle(first[name] + hits[name]) * MS}
        else:
            values["hit ms"] = middle(hits[name]) * MS
            values["hit, worst ms"] = max(hits[name]) * MS
            values["hit tokens"] = cached
            values["same first token"] = f"{same} of {len(hits[name])}"
            if first["none"]:
                values["hit of computed"] = middle(hits[name]) / middle(first["none"] + hits["none"])
            if name == "safe" and hits["stock"]:
                values["hit of stock's"] = middle(hits[name]) / middle(hits["stock"])
        return Row(name, values)


class DecodeRate:
    key = "decode"
    description = (
        f"Output tokens a second of {DECODERS} running requests, while a new prompt of two blocks is computed every"
        f" {EVERY} steps and, with a connector, stored. The engines take turns of {CYCLES} such cycles, so that a drift"
        " of the machine hits all alike; a ratio is the median over rounds, noise its standard error. The pools are"
        " used before the first round. Decode steps are CUDA graphs, steps with a prompt are eager."
    )

    def can_run(self) -> str | None:
        return cannot_run()

    def run(self, quick: bool) -> Iterator[Row]:
        ENGINES.start()
        rounds = 4 if quick else 200
        for name in NAMES:
            for seed in range(3):  # the pool's first use, and compiling
                ENGINES.ask(name, "generate", seed=10**6 + seed, tokens=PROMPT)
            ENGINES.ask(name, "reset")
            ENGINES.ask(name, "start_decoding", seed=1, requests=DECODERS, tokens=(rounds + 2) * CYCLES * EVERY + 2)
        for number in range(-2, 0):  # warms
            self._round(number)
        answers: list[dict[str, dict[str, Any]]] = []
        give_up = time.monotonic() + DECODE_S
        while len(answers) < rounds and time.monotonic() < give_up:
            answers.append(self._round(len(answers)))
        stored = {name: self._stored(name, len(answers) - 1) for name in NAMES}
        for name in NAMES:
            if name not in ENGINES.broken:
                yield self._row(name, answers)
        ENGINES.complain()
        if missing := [name for name in NAMES if stored[name] != (0 if name == "none" else 2 * BLOCK)]:
            raise RuntimeError(f"the prompts of the last round are not stored by {', '.join(missing)}: {stored}")

    def _round(self, number: int) -> dict[str, dict[str, Any]]:
        """Answers of the engines, each first in its turn."""
        answers = {}
        for name in NAMES[number % 3 :] + NAMES[: number % 3]:
            answer = ENGINES.ask(name, "decode", seed=_seed(number), cycles=CYCLES, every=EVERY, prefill_tokens=PREFILL)
            if answer is not None:
                answers[name] = answer
        return answers

    def _stored(self, name: str, number: int) -> int | None:
        """The tokens that a prompt of this round hits; None from an engine that is broken."""
        ENGINES.ask(name, "stop_decoding")
        ENGINES.ask(name, "reset")
        answer = ENGINES.ask(name, "generate", seed=_seed(number), tokens=PREFILL)
        return None if answer is None else answer["cached"]

    def _row(self, name: str, answers: list[dict[str, dict[str, Any]]]) -> Row:
        rates = [answer[name]["tokens_per_s"] for answer in answers]
        values: dict[str, Any] = {
            "rounds": len(rates),
            "tokens/s": statistics.median(rates),
            "spread %": 100 * (percentile(rates, 0.9) - percentile(rates, 0.1)) / statistics.median(rates),
            "median step ms": statistics.median(answer[name]["median_step_ms"] for answer in answers),
        }
        if name == "none" or "none" in ENGINES.broken:
            return Row(name, values)
        shares = [answer[name]["tokens_per_s"] / answer["none"]["tokens_per_s"] for answer in answers]
        share, noise = median_and_noise(shares)
        values |= {"of none's": share, "noise": noise}
        return Row(name, values, (Check("tokens/s, of none's", share, ">=", 0.99),) if name == "safe" else ())


def _seed(number: int) -> int:
    """Of the prompts of a round of `decode`; the first one's itself, as steps count from 0."""
    return (number + 3) * 10**6
