"""The stock server's own protocol, as a vLLM worker speaks it, without vLLM: the baseline of `server.py`.

The server maps the layers by CUDA IPC and copies in its own process.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gpu_world import PIECE

ATTENTION_LAYERS, RECURRENT_LAYERS, CHUNK_BLOCKS, BLOCK_TOKENS = 16, 48, 4, 400
CHUNK_TOKENS = CHUNK_BLOCKS * BLOCK_TOKENS
FLAGS = ("--supported-transfer-mode", "lmcache_driven", "--separate-object-groups", "--chunk-size", str(CHUNK_TOKENS))
_ANSWER_S = 60.0


def layers_of(blocks: int) -> dict[str, torch.Tensor]:
    """Layers as the stock connector registers them: int8, [blocks, 1, tokens, bytes of a token]."""
    names = [f"attention{i}" for i in range(ATTENTION_LAYERS)] + [f"recurrent{i}" for i in range(RECURRENT_LAYERS)]
    shape = (blocks, 1, BLOCK_TOKENS, PIECE // BLOCK_TOKENS)
    return {name: torch.randint(-100, 100, shape, dtype=torch.int8, device="cuda") for name in names}


def states(blocks: Sequence[int]) -> list[int]:
    """Of the recurrent blocks only the last one of each chunk is real."""
    return [block if i % CHUNK_BLOCKS == CHUNK_BLOCKS - 1 else 0 for i, block in enumerate(blocks)]


class StockWorker:
    """Registers layers, stores and retrieves chunks. One at a time, and to the end."""

    def __init__(self, url: str, layers: dict[str, torch.Tensor]) -> None:
        from lmcache.utils import EngineType
        from lmcache.v1.multiprocess.group_view import EngineGroupInfo
        from lmcache.v1.multiprocess.transfer_context import create_transfer_context
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory
        from zmq.sugar.context import Context

        self._client = RequestClientFactory.create(url, context=Context.instance())
        chunk = self._client.get_chunk_size().result(timeout=20)
        assert chunk == CHUNK_TOKENS, chunk
        self._layers = layers
        groups = [
            EngineGroupInfo(
                engine_group_id=0,
                layer_indices=tuple(range(ATTENTION_LAYERS)),
                tokens_per_block=BLOCK_TOKENS,
                sw_size_tokens=-1,
            ),
            EngineGroupInfo(
                engine_group_id=1,
                layer_indices=tuple(range(ATTENTION_LAYERS, len(layers))),
                tokens_per_block=BLOCK_TOKENS,
                sw_size_tokens=BLOCK_TOKENS,
                recurrent_state=True,
            ),
        ]
        self._context = create_transfer_context(
            layers, instance_id=uuid.uuid4().int & (2**63 - 1), req_client=self._client, mode="lmcache_driven"
        )
        self._context.register(
            layers, "bench", 1, 1, 30.0, layout_hints={}, engine_group_infos=groups, engine_type=EngineType.VLLM
        )

    def store(self, tokens: tuple[int, ...], blocks: Sequence[int]) -> float:
        """Seconds until the server has acknowledged it."""
        request = uuid.uuid4().hex
        torch.cuda.synchronize()
        begin = time.perf_counter()
        future = self._context.submit_store(
            request, self._key(tokens, request), self._layers, [list(blocks), states(blocks)], self._event(), 1
        )
        if not future.result(timeout=_ANSWER_S):
            raise RuntimeError("the stock server refused a store")
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        self._end(request)
        return seconds

    def lookup(self, tokens: tuple[int, ...]) -> tuple[str, float]:
        """The request that holds a hit on all of these tokens, and the seconds of its lookup. A store is visible only
        some time after it was acknowledged."""
        give_up = time.perf_counter() + 5
        while True:
            request = uuid.uuid4().hex
            begin = time.perf_counter()
            self._client.lookup(self._key(tokens, request, worker=None), 1).result(timeout=20)
            while (hit := self._client.query_prefetch_status(request).result(timeout=20)) is None:
                pass
            seconds = time.perf_counter() - begin
            if hit * CHUNK_TOKENS == len(tokens):
                return request, seconds
            self._end(request)
            if time.perf_counter() > give_up:
                raise RuntimeError(
                    f"the stock server finds {hit} chunks of {len(tokens) // CHUNK_TOKENS} it has stored"
                )
            time.sleep(0.002)

    def retrieve(self, tokens: tuple[int, ...], request: str, blocks: Sequence[int]) -> float:
        """Seconds until the chunks, and the last state, are in these blocks."""
        last_state = [0] * (len(blocks) - 1) + [blocks[-1]]
        torch.cuda.synchronize()
        begin = time.perf_counter()
        future = self._context.submit_retrieve(
            request, self._key(tokens, request), self._layers, [list(blocks), last_state], self._event(), 1
        )
        if not future.result(timeout=_ANSWER_S):
            raise RuntimeError("the stock server refused a retrieve")
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
        self._end(request)
        return seconds

    def _event(self) -> Any:
        return self._context.create_recorded_event()

    def _key(self, tokens: tuple[int, ...], request: str, worker: int | None = 0) -> Any:
        from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey

        return IPCCacheServerKey(
            model_name="bench",
            world_size=1,
            worker_id=worker,
            token_ids=tokens,
            start=0,
            end=len(tokens),
            request_id=request,
            num_kv_readers=1,
        )

    def _end(self, request: str) -> None:
        self._client.end_session(request).result(timeout=20)
