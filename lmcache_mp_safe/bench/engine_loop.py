"""A scheduler in small around vLLM's real requests, block hashes and KV cache manager: it decides what a step computes
and calls every connector's scheduler hooks where vLLM calls them.

Requests come one after the other: the next one arrives when the prompt before it is computed. Decoding requests go
first, one token each; what is left of the step's budget goes to the prompt being computed.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.request import Request, RequestStatus

from lmcache_mp_safe.bench.connectors import Side, Stopwatch
from lmcache_mp_safe.bench.shapes import Shape, kv_cache_config

VOCABULARY = 65536
_TOKENS = np.array(range(VOCABULARY), dtype=object)


def prompt(length: int, seed: int) -> list[int]:
    """Token ids below 65,536, drawn evenly: most take three bytes on the wire, as those of ordinary text do."""
    drawn = np.random.default_rng(seed).integers(0, VOCABULARY, length)
    return list(_TOKENS[drawn])


@dataclass
class EngineLoop:
    """One engine; every side sees the same steps.

    Attributes:
        phase: the name under which hooks of coming steps are added up, when no prompt is being computed.
        watches: time in hooks, by side.
        steps: steps by phase.
        hits: tokens of each admitted request that were loaded.
    """

    shape: Shape
    all_sides: Sequence[Side]
    blocks: int
    step_tokens: int
    max_tokens: int
    phase: str = "decode"
    watches: list[Stopwatch] = field(default_factory=list)
    steps: dict[str, int] = field(default_factory=dict)
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    hits: dict[str, int] = field(default_factory=dict)
    _loading: dict[str, tuple[Request, int]] = field(default_factory=dict)
    _fresh: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        init_none_hash(sha256)
        block = self.shape.block_tokens
        self._hasher = get_request_block_hasher(block, sha256)
        self.manager = KVCacheManager(
            kv_cache_config(self.shape, self.blocks),
            max_model_len=self.max_tokens,
            scheduler_block_size=block,
            hash_block_size=block,
        )
        for side in self.all_sides:
            side.start(self.manager.block_pool)  # type: ignore[attr-defined]
        self.watches = [Stopwatch() for _ in self.all_sides]
        self._numbers = itertools.count()

    def add(self, tokens: list[int]) -> Request:
        request = Request(
            f"request-{next(self._numbers)}", tokens, SamplingParams(max_tokens=1 << 20), None,
            block_hasher=self._hasher,
        )  # fmt: skip
        self.waiting.append(request)
        return request

    @property
    def computing(self) -> bool:
        """Whether a prompt is waiting, being loaded or being computed."""
        return bool(self.waiting or self._loading) or any(self._is_prefilling(request) for request in self.running)

    def _is_prefilling(self, request: Request) -> bool:
        return bool(request.num_computed_tokens < request.num_prompt_tokens)

    # --- a step -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Schedule, call the hooks, let the workers and the servers do their part."""
        budget = self.step_tokens
        scheduled: dict[str, int] = {}
        blocks: dict[str, Any] = {}
        for request in self.running:
            tokens = self._share(request, budget)
            new = self.manager.allocate_slots(request, tokens) if tokens else None
            if new is None:
                continue
            scheduled[request.request_id], blocks[request.request_id] = tokens, new
            budget -= tokens
        if self.waiting and budget > 0:
            self._admit(budget, scheduled, blocks)
        prefills = any(self._is_prefilling(request) for request in self.running)
        phase = "prefill" if prefills else self.phase
        self.steps[phase] = self.steps.get(phase, 0) + 1
        output = self._output(scheduled, blocks)
        for side, watch in zip(self.all_sides, self.watches, strict=True):
            with watch.running(phase):
                metadata = side.connector.build_connector_meta(output)
            side.execute(metadata)
        for request in self.running:
            request.num_computed_tokens += scheduled.get(request.request_id, 0)
            if scheduled.get(request.request_id) and request.num_computed_tokens == request.num_tokens:
                request.append_output_token_ids(7)
        for side, watch in zip(self.all_sides, self.watches, strict=True):
            side.server.work()
            report = side.report()
            with watch.running(phase):
                side.connector.update_connector_output(report)
            for request_id in side.take_received():
                self._loaded(request_id)

    def _share(self, request: Request, budget: int) -> int:
        """Tokens of the request in this step. Recurrent states are left at multiples of the block only."""
        tokens = min(request.num_tokens - request.num_computed_tokens, budget)
        ends = request.num_computed_tokens + tokens
        last_block = request.num_prompt_tokens // self.shape.block_tokens * self.shape.block_tokens
        if self.shape.state_groups and request.num_computed_tokens < last_block:
            ends = min(ends // self.shape.block_tokens * self.shape.block_tokens, last_block)
        return max(0, int(ends - request.num_computed_tokens))

    def _admit(self, budget: int, scheduled: dict[str, int], blocks: dict[str, Any]) -> None:
        request = self.waiting[0]
        answers = set()
        for side, watch in zip(self.all_sides, self.watches, strict=True):
            with watch.running("admission"):
                tokens, _ = side.connector.get_num_new_matched_tokens(request, 0)
            answers.add(tokens)
        if None in answers:
            return
        (external,) = answers  # sides that run together see the same hit, which is none
        self.waiting.popleft()
        self.hits[request.request_id] = external
        if external:
            self._allocate(request, 0, external)
            self._loading[request.request_id] = (request, external)
            return
        tokens = self._share(request, budget)
        blocks[request.request_id] = self._allocate(request, tokens, 0)
        scheduled[request.request_id] = tokens
        self._start(request)

    def _allocate(self, request: Request, tokens: int, external: int) -> Any:
        new = self.manager.allocate_slots(
            request, tokens, num_external_computed_tokens=external, delay_cache_blocks=bool(external)
        )
        if new is None:
            raise RuntimeError("the benchmark's block pool is too small")
        allocated = self.manager.get_blocks(request.request_id)
        for side, watch in zip(self.all_sides, self.watches, strict=True):
            with watch.running("admission"):
                side.connector.update_state_after_alloc(request, allocated, external)
        return new

    def _start(self, request: Request) -> None:
        request.status = RequestStatus.RUNNING
        self.running.append(request)
        self._fresh.add(request.request_id)

    def _loaded(self, request_id: str) -> None:
        request, external = self._loading.pop(request_id)
        request.num_computed_tokens = external
        self.manager.cache_blocks(request, external)
        self._start(request)

    def _output(self, scheduled: dict[str, int], blocks: dict[str, Any]) -> SchedulerOutput:
        requests = [request for request in self.running if request.request_id in scheduled]
        fresh = [request for request in requests if request.request_id in self._fresh]
        cached = [request for request in requests if request.request_id not in self._fresh]
        self._fresh.difference_update(scheduled)
        return SchedulerOutput(
            scheduled_new_reqs=[
                NewRequestData.from_request(request, self.manager.get_block_ids(request.request_id))
                for request in fresh
            ],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=[request.request_id for request in cached],
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=[blocks[request.request_id].get_block_ids(allow_none=True) for request in cached],
                num_computed_tokens=[request.num_computed_tokens for request in cached],
                num_output_tokens=[request.num_output_tokens for request in cached],
            ),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            finished_req_ids=set(),
            free_encoder_mm_hashes=[],
        )

    # --- the end of a life ------------------------------------------------------------------------------------------

    def finish(self, request: Request) -> None:
        request.status = RequestStatus.FINISHED_STOPPED
        blocks = self.manager.get_block_ids(request.request_id)
        for side, watch in zip(self.all_sides, self.watches, strict=True):
            with watch.running("finish"):
                side.connector.request_finished_all_groups(request, blocks)
        self.running.remove(request)
        self.manager.free(request)

    def drain(self, limit: int = 10_000) -> None:
        """Steps without tokens until no side has anything under way.

        Raises:
            RuntimeError: there is no end to it.
        """
        for _ in range(limit):
            if not any(side.busy() for side in self.all_sides):
                return
            self.step()
        raise RuntimeError("a connector still has work under way")
