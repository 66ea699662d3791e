"""An OpenAI-compatible server over HTTP: streamed chats with log-probabilities, greedy, each with a deadline."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import httpx

from lmcache_mp_safe.errors import Scope, ServerError
from lmcache_mp_safe.verify.checks import Answer, Token
from lmcache_mp_safe.verify.traffic import Request

TOP_LOGPROBS = 5
_RESET_TRIES, _RESET_EVERY_S = 40, 0.25
_NOT_THERE = (404, 405)


class Client:
    """One server.

    Args:
        url: with or without `/v1`. key: API key; none is sent if empty. timeout_s: for each request as a whole.
        transport: another way to the server than the network, for a stub in this process.
    """

    def __init__(
        self, url: str, *, key: str = "", timeout_s: float, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # The environment's proxies are not used: nothing goes anywhere but to the given address.
        self._http = httpx.AsyncClient(
            base_url=self.url, headers=headers, timeout=timeout_s, transport=transport, trust_env=False
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def first_model(self) -> str:
        """Name of the first model that the server serves.

        Raises:
            ServerError: it does not answer, or serves none.
        """
        try:
            reply = await self._http.get("/v1/models")
            reply.raise_for_status()
            return str(reply.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            raise self._trouble(f"GET /v1/models: {error!r}") from error

    async def ask(self, request: Request, *, model: str, max_tokens: int, salt: str, began: float) -> Answer:
        """The answer to one request.

        Args:
            salt: keeps apart what may share a cache. began: `time.monotonic()` of the run's start.

        Raises:
            ServerError: no complete answer in time; the message says what came instead.
        """
        body = {
            "model": model,
            "messages": [{"role": role, "content": content} for role, content in request.messages],
            "max_tokens": max_tokens,
            "temperature": 0,
            "logprobs": True,
            "top_logprobs": TOP_LOGPROBS,
            "stream": True,
            "stream_options": {"include_usage": True},
            "cache_salt": salt,
        }
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._ask(body, began)
        except (httpx.HTTPError, TimeoutError, ValueError, KeyError, TypeError) as error:
            raise self._trouble(f"{request.name}: {error!r}") from error

    async def _ask(self, body: dict[str, Any], began: float) -> Answer:
        asked = time.monotonic()
        first: float | None = None
        text, tokens, finish, usage = "", list[Token](), "", dict[str, Any]()
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code != httpx.codes.OK:
                words = (await reply.aread()).decode(errors="replace")[:500]
                raise ValueError(f"status {reply.status_code}: {words}")
            async for event in _events(reply):
                if "error" in event:
                    raise ValueError(str(event["error"]))
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    new = _tokens(choice.get("logprobs"))
                    if new and first is None:
                        first = time.monotonic()
                    text += _text(choice.get("delta", {}))
                    tokens += new
                    finish = choice.get("finish_reason") or finish
        if not finish or first is None:
            raise ValueError("the stream ended early, or without log-probabilities (they are needed)")
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            text,
            tuple(tokens),
            finish,
            int(usage.get("prompt_tokens", 0)),
            details.get("cached_tokens"),
            first - asked,
            asked - began,
        )

    async def reset_cache(self) -> bool:
        """Empty the server's own prefix cache, not the connector's. False where it has no such route, or refuses.

        vLLM has it with VLLM_SERVER_DEV_MODE=1, and refuses while blocks are held: stores under way, for example.

        Raises:
            ServerError: it does not answer.
        """
        try:
            for _ in range(_RESET_TRIES):
                reply = await self._http.post("/reset_prefix_cache")
                if reply.status_code in _NOT_THERE:
                    return False
                reply.raise_for_status()
                if not reply.content or reply.json().get("success", True):
                    return True
                await asyncio.sleep(_RESET_EVERY_S)
        except (httpx.HTTPError, ValueError) as error:
            raise self._trouble(f"POST /reset_prefix_cache: {error!r}") from error
        return False

    def _trouble(self, what: str) -> ServerError:
        return ServerError(f"{self.url}: {what}", scope=Scope.SERVER)


async def _events(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The JSON values of a server-sent event stream, up to its end mark."""
    async for line in reply.aiter_lines():
        if line.startswith("data:"):
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                return
            yield json.loads(data)


def _text(delta: dict[str, Any]) -> str:
    """What the model said, its reasoning included."""
    return "".join(delta.get(part) or "" for part in ("reasoning_content", "reasoning", "content"))


def _tokens(logprobs: dict[str, Any] | None) -> list[Token]:
    return [
        Token(
            one["token"], float(one["logprob"]), tuple((o["token"], float(o["logprob"])) for o in one["top_logprobs"])
        )
        for one in (logprobs or {}).get("content") or ()
    ]
