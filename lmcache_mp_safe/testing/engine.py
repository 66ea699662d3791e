"""A real vLLM engine on CPU, driven step by step: for tests, the demo and `verify`.

    spec = EngineSpec(model_dir, kind="hybrid", speculation="mtp", connector="safe", connector_extra={...})
    with Engine(spec) as engine:
        first = engine.generate([prompt], max_tokens=24)[0]
        engine.reset_prefix_cache()
        again = engine.generate([prompt], max_tokens=24)[0]
        assert again.external_tokens > 0 and again.token_ids == first.token_ids

The scheduler lives in this process, so that a test can look at it between two steps; with `tensor_parallel_size`
above one the workers are child processes. An engine takes over process-wide state of vLLM, so there is one at a time;
another may follow after `close`. For a clean slate, a second engine at the same time, another interpreter, or `kill
-9`, see `engine_worker.EngineProcess`.
"""

from __future__ import annotations

import gc
import itertools
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Literal, TypeAlias

import torch

from lmcache_mp_safe.testing.cpu_guards import prepare_cpu_engine
from lmcache_mp_safe.testing.models import ModelKind, write_model

Speculation: TypeAlias = Literal["none", "ngram", "mtp"]

# An idle machine needs a second; where ranks in processes of their own spin for few processors it takes long.
DRAIN_DEADLINE_S = 60.0

# What makes vLLM's CPU build start quickly, offline and quietly. A value that is set already is kept.
ENVIRONMENT: Mapping[str, str] = {
    "HF_HUB_OFFLINE": "1",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_TRACK_USAGE": "false",
    # One thread: sums come out the same bit for bit in every process and on every machine, whatever runs beside them;
    # the models are too small to gain from more; and vLLM's own binding refuses two workers on one memory node.
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",  # ngram drafting; it would set the number for everything else in the process too
    "TORCHDYNAMO_DISABLE": "1",  # a compilation costs more than everything these models do
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}

_SPECULATIVE_CONFIG: Mapping[Speculation, dict[str, Any] | None] = {
    "none": None,
    # Single tokens only, looked up in a prompt that holds them all: always three drafts. vLLM's CPU build fails when
    # a step has fewer tokens than the step before accepted.
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1, "prompt_lookup_min": 1},
    "mtp": {"method": "mtp", "num_speculative_tokens": 2},
}

_CONNECTORS: Mapping[str, dict[str, Any]] = {
    "safe": {"kv_connector": "LMCacheMPSafeConnector"},
    "stock": {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
    },
}


class EngineStuckError(Exception):
    """The engine did not reach the state that was waited for."""


@dataclass(frozen=True)
class EngineSpec:
    """Everything that decides what an engine does.

    Attributes:
        model_dir: where the model is; written there first if it holds none. kind: the model to write. speculation:
        ngram and mtp draft with the tables above; mtp needs the hybrid model. connector: None, "safe", "stock", or a
        whole `kv_transfer_config`. connector_extra: `kv_connector_extra_config` of "safe" and "stock". block_size:
        None lets vLLM choose; for the hybrid model that is 640 tokens. num_gpu_blocks_override: a small number makes
        the pool run dry. in_process: False puts the scheduler into a child process too, as `vllm serve` does; the
        properties of `Engine` that
            look at it are then out of reach.
        options: further arguments of `vllm.LLM`, which win over the ones made here.
    """

    model_dir: str
    kind: ModelKind = "hybrid"
    model_seed: int = 0
    speculation: Speculation = "none"
    connector: Literal["safe", "stock"] | Mapping[str, Any] | None = None
    connector_extra: Mapping[str, Any] = field(default_factory=dict)
    kv_role: Literal["kv_both", "kv_producer", "kv_consumer"] = "kv_both"
    block_size: int | None = None
    max_model_len: int = 16384
    max_num_batched_tokens: int = 1300
    max_num_seqs: int = 4
    num_gpu_blocks_override: int | None = None
    tensor_parallel_size: int = 1
    seed: int = 0
    in_process: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `vllm.LLM`."""
        arguments: dict[str, Any] = {
            "model": self.model_dir,
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",  # the recurrent kernels refuse float32
            "enforce_eager": True,
            "enable_prefix_caching": True,
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "num_gpu_blocks_override": self.num_gpu_blocks_override,
            "tensor_parallel_size": self.tensor_parallel_size,
            "speculative_config": _SPECULATIVE_CONFIG[self.speculation],
            "kv_transfer_config": self._kv_transfer_config(),
            "seed": self.seed,
            "use_tqdm_on_load": False,
        }
        if self.kind == "hybrid":
            arguments |= {"mamba_cache_mode": "align", "mamba_ssm_cache_dtype": "float32"}
        if self.block_size is not None:
            arguments["block_size"] = self.block_size
        return arguments | dict(self.options)

    def _kv_transfer_config(self) -> dict[str, Any] | None:
        if self.connector is None:
            return None
        if isinstance(self.connector, str):
            extra = {"kv_role": self.kv_role, "kv_connector_extra_config": dict(self.connector_extra)}
            return _CONNECTORS[self.connector] | extra
        return dict(self.connector)


@dataclass(frozen=True)
class Answer:
    """What one request got.

    Attributes:
        logprobs: log-probability of each token, as the model gave it.
        cached_tokens: prompt tokens that were not computed: local and external.
        external_tokens: those of them that the connector delivered.
        preemptions: how often vLLM threw the request out for want of blocks; 0 if the scheduler is in another process.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    prompt_tokens: int
    cached_tokens: int
    external_tokens: int
    preemptions: int = 0

    @property
    def local_tokens(self) -> int:
        return self.cached_tokens - self.external_tokens


@dataclass(frozen=True)
class GroupFacts:
    """One KV cache group as vLLM made it."""

    spec: str
    block_size: int
    page_bytes: int
    layers: tuple[str, ...]


class Engine:
    """One vLLM engine. Not thread-safe; close it, or use it as a context manager."""

    _one: ClassVar[EngineSpec | None] = None  # what this process runs

    def __init__(self, spec: EngineSpec) -> None:
        if Engine._one is not None:
            raise RuntimeError(f"this process runs an engine already: close it, or use EngineProcess; {Engine._one}")
        self.spec = spec
        _prepare_environment(spec)
        if not (Path(spec.model_dir) / "config.json").exists():
            write_model(spec.kind, spec.model_dir, spec.model_seed)
        prepare_cpu_engine(speculation=spec.speculation != "none")
        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # read too early: torch is imported by now
        from vllm import LLM  # not earlier: it reads the environment

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vLLM's start is not what a test of ours is about
            self._llm: Any = LLM(**spec.arguments())
        Engine._one = spec
        self._external_tokens: dict[str, int] = {}
        self._requests: dict[str, Any] = {}
        self._names = (f"request-{number}" for number in itertools.count())
        self._watch_outputs()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- requests ----------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        *,
        salts: Sequence[str | None] | None = None,
        request_ids: Sequence[str] | None = None,
        deadline_s: float = 300.0,
    ) -> list[Answer]:
        """Run the prompts together, greedily, to exactly `max_tokens` each. Answers in the order of the prompts."""
        salts = salts if salts is not None else [None] * len(prompts)
        request_ids = request_ids if request_ids is not None else [next(self._names) for _ in prompts]
        for prompt, salt, request_id in zip(prompts, salts, request_ids, strict=True):
            self.submit(prompt, max_tokens, salt=salt, request_id=request_id)
        done = self._collect(set(request_ids), deadline_s)
        return [done[request_id] for request_id in request_ids]

    def _collect(self, wanted: set[str], deadline_s: float) -> dict[str, Answer]:
        done: dict[str, Answer] = {}

        def missing() -> str:
            return f"no answer for {', '.join(sorted(wanted - done.keys()))}"

        for _ in _until(deadline_s, missing):
            for answer in self.step():
                done[answer.request_id] = answer
            if done.keys() >= wanted:
                break
        return done

    def submit(
        self, prompt: Sequence[int], max_tokens: int, *, salt: str | None = None, request_id: str | None = None
    ) -> str:
        """Queue one request; `step` answers it. Returns its id."""
        from vllm import SamplingParams

        request_id = request_id if request_id is not None else next(self._names)
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=0)
        inputs: dict[str, Any] = {"prompt_token_ids": list(prompt)}
        if salt is not None:
            inputs["cache_salt"] = salt
        internal_id = self.llm_engine.add_request(request_id, inputs, sampling)
        if self.spec.in_process:
            self._requests[request_id] = self.scheduler.requests[internal_id or request_id]
        return request_id

    def step(self) -> list[Answer]:
        """One engine step; the answers of the requests that it finished. Steps without requests are fine in process."""
        return [self._answer(output) for output in self.llm_engine.step() if output.finished]

    def abort(self, request_id: str) -> None:
        self.llm_engine.abort_request([request_id])
        self._requests.pop(request_id, None)

    # --- state between requests ----------------------------------------------------

    def reset_prefix_cache(self, deadline_s: float = DRAIN_DEADLINE_S) -> None:
        """Empty vLLM's prefix cache, so that the next hit is external. Steps the engine while blocks are held."""
        for _ in _until(deadline_s, lambda: f"reset_prefix_cache is still refused: {self._held_words()}"):
            if self._llm.reset_prefix_cache():
                return
            self._idle_step()

    def drain(self, deadline_s: float = DRAIN_DEADLINE_S) -> None:
        """Step until no request and no work of the connector is left."""
        for _ in _until(deadline_s, lambda: f"the connector still has work: {self._held_words()}"):
            if not self.scheduler.has_requests():
                return
            self._idle_step()

    def held_blocks(self) -> int:
        """Blocks that are not free, the null block aside; 0 when nothing runs and nothing is pinned."""
        pool = self.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())

    def close(self) -> None:
        """Stop workers and connector and give memory and vLLM's process-wide state back."""
        if self._llm is None:
            return
        self.llm_engine.engine_core.shutdown()
        self._llm = None
        Engine._one = None
        self._requests.clear()
        if self.spec.in_process:
            from vllm.distributed import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()  # 0.27 leaves this to its caller
        gc.collect()

    # --- a look inside ---------------------------------------------------------------

    @property
    def llm_engine(self) -> Any:
        return self._llm.llm_engine

    @property
    def vllm_config(self) -> Any:
        return self.llm_engine.vllm_config

    @property
    def block_size(self) -> int:
        return int(self.vllm_config.cache_config.block_size)

    @property
    def scheduler(self) -> Any:
        return self._core.scheduler

    @property
    def kv_cache_manager(self) -> Any:
        return self.scheduler.kv_cache_manager

    @property
    def block_pool(self) -> Any:
        return self.kv_cache_manager.block_pool

    @property
    def connector(self) -> Any:
        """The scheduler side of the KV connector; None without one."""
        return self.scheduler.connector

    @property
    def worker_connector(self) -> Any:
        """The worker side of the KV connector, of the rank that lives in this process."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    @property
    def groups(self) -> tuple[GroupFacts, ...]:
        return tuple(
            GroupFacts(
                spec=type(group.kv_cache_spec).__name__,
                block_size=int(group.kv_cache_spec.block_size),
                page_bytes=int(group.kv_cache_spec.page_size_bytes),
                layers=tuple(group.layer_names),
            )
            for group in self.scheduler.kv_cache_config.kv_cache_groups
        )

    def cached_blocks(self, group: int) -> dict[bytes, int]:
        """Block id by hash: what vLLM's prefix cache would serve from that KV cache group."""
        from vllm.v1.core.kv_cache_utils import get_group_id

        hashed = [block for block in self.block_pool.blocks if block.block_hash is not None]
        return {block.block_hash: block.block_id for block in hashed if get_group_id(block.block_hash) == group}

    def layer_caches(self) -> dict[str, tuple[Any, ...]]:
        """The cache tensors of each layer, block first, of the rank that lives in this process."""
        context = self.vllm_config.compilation_config.static_forward_context
        layers = [layer for group in self.groups for layer in group.layers]
        return {layer: _as_tensors(context[layer].kv_cache) for layer in layers}

    @property
    def _core(self) -> Any:
        if not self.spec.in_process:
            raise RuntimeError("the scheduler of this engine is in another process: set EngineSpec.in_process")
        return self.llm_engine.engine_core.engine_core

    def _held_words(self) -> str:
        return f"{self.held_blocks()} blocks held" if self.spec.in_process else "blocks held in the engine-core process"

    def _idle_step(self) -> None:
        # An engine core in its own process steps by itself, and asking for outputs that never come would block.
        if self.spec.in_process:
            self.step()
        time.sleep(0.002)

    def _watch_outputs(self) -> None:
        # Only the engine core's own output tells external tokens from local ones.
        client = self.llm_engine.engine_core
        get_output = client.get_output

        def watched() -> Any:
            outputs = get_output()
            for output in outputs.outputs:
                if output.prefill_stats is not None:
                    self._external_tokens[output.request_id] = output.prefill_stats.num_external_cached_tokens
            return outputs

        client.get_output = watched

    def _answer(self, output: Any) -> Answer:
        completion = output.outputs[0]
        token_ids = tuple(completion.token_ids)
        request = self._requests.pop(output.request_id, None)
        return Answer(
            request_id=output.request_id,
            token_ids=token_ids,
            logprobs=tuple(at[token].logprob for at, token in zip(completion.logprobs, token_ids, strict=True)),
            prompt_tokens=len(output.prompt_token_ids),
            cached_tokens=output.num_cached_tokens or 0,
            external_tokens=self._take_external_tokens(output.request_id),
            preemptions=request.num_preemptions if request is not None else 0,
        )

    def _take_external_tokens(self, request_id: str) -> int:
        # The engine core knows the request as "<id>-<random>" (0.32) or by its own id.
        known = [name for name in self._external_tokens if name == request_id or name.rpartition("-")[0] == request_id]
        return sum(self._external_tokens.pop(name) for name in known)


def _prepare_environment(spec: EngineSpec) -> None:
    if (numba := sys.modules.get("numba")) is not None:  # it refuses another number once it has threads
        os.environ.setdefault("NUMBA_NUM_THREADS", str(numba.config.NUMBA_NUM_THREADS))
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0" if spec.in_process else "1"


def _as_tensors(kv_cache: Any) -> tuple[Any, ...]:
    """One tensor or a list of them, nested once on older versions."""
    if not isinstance(kv_cache, list | tuple):
        return (kv_cache,)
    return tuple(tensor for part in kv_cache for tensor in _as_tensors(part))


def _until(deadline_s: float, why: Callable[[], str]) -> Iterator[None]:
    """Yield again and again; after `deadline_s` seconds raise what `why` says."""
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        yield
    raise EngineStuckError(f"{why()} after {deadline_s:g} s")
