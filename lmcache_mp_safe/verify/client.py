"""An OpenAI-compatible server over HTTP: streamed chats with log-probabilities, greedy, each with a deadline."""

from __future__ import annotations

import asyncio
import enum
import json
import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families

from lmcache_mp_safe.errors import ConfigError, Scope, ServerError
from lmcache_mp_safe.verify.checks import Answer, Token
from lmcache_mp_safe.verify.traffic import Request

TOP_LOGPROBS = 5
_RESET_TRIES, _RESET_EVERY_S = 40, 0.25
_NOT_THERE = (404, 405)
_NO_ENTRY = (401, 403)
_EXTERNAL_HITS = "vllm:external_prefix_cache_hits_total"  # tokens, by every engine


class Reset(enum.Enum):
    """How emptying a server's own prefix cache ended."""

    DONE = enum.auto()
    NO_ROUTE = enum.auto()
    REFUSED = enum.auto()


class Client:
    """One server.

    Args:
        url: with or without `/v1`. key: API key; none is sent if empty. timeout_s: for each request as a whole.
        transport: another way to the server than the network, for a stub in this process.

    Raises:
        ConfigError: `url` cannot be read.
    """

    def __init__(
        self, url: str, *, key: str = "", timeout_s: float, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._timeout_s = timeout_s
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        # The environment's proxies are not used: nothing goes anywhere but to the given address.
        try:
            self._http = httpx.AsyncClient(
                base_url=self.url, headers=headers, timeout=timeout_s, transport=transport, trust_env=False
            )
        except httpx.InvalidURL as error:
            raise ConfigError(f"{url!r} is no address ({error}): it is like http://127.0.0.1:8000") from error

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def models(self) -> list[str]:
        """Names of the models that the server serves; at least one.

        Raises:
            ServerError: it does not answer, or serves none.
        """
        try:
            reply = await self._http.get("/v1/models")
            _check(reply.status_code, reply.text)
            names = [str(model["id"]) for model in reply.json()["data"]]
            if not names:
                raise ValueError("it serves no model")
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            raise self._trouble("GET /v1/models", error) from error
        return names

    async def external_tokens(self) -> int | None:
        """Prompt tokens that a KV connector brought since the server started; None where no metric says so.

        Raises:
            ServerError: it does not answer.
        """
        try:
            reply = await self._http.get("/metrics")
            if reply.status_code != httpx.codes.OK:
                return None
            samples = [one for family in text_string_to_metric_families(reply.text) for one in family.samples]
        except httpx.HTTPError as error:
            raise self._trouble("GET /metrics", error) from error
        except ValueError:
            return None
        counts = [int(sample.value) for sample in samples if sample.name == _EXTERNAL_HITS]
        return sum(counts) if counts else None

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
            raise self._trouble(request.name, error) from error

    async def _ask(self, body: dict[str, Any], began: float) -> Answer:
        asked = time.monotonic()
        first: float | None = None
        text, tokens, finish, usage = "", list[Token](), "", dict[str, Any]()
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code != httpx.codes.OK:
                _check(reply.status_code, (await reply.aread()).decode(errors="replace"))
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

    async def reset_cache(self) -> Reset:
        """Empty the server's own prefix cache, not the connector's.

        vLLM has it with VLLM_SERVER_DEV_MODE=1, and refuses while blocks are held: stores under way, for example.

        Raises:
            ServerError: it does not answer.
        """
        try:
            for _ in range(_RESET_TRIES):
                reply = await self._http.post("/reset_prefix_cache")
                if reply.status_code in _NOT_THERE:
                    return Reset.NO_ROUTE
                _check(reply.status_code, reply.text)
                if not reply.content or reply.json().get("success", True):
                    return Reset.DONE
                await asyncio.sleep(_RESET_EVERY_S)
        except (httpx.HTTPError, ValueError) as error:
            raise self._trouble("POST /reset_prefix_cache", error) from error
        return Reset.REFUSED

    def _trouble(self, what: str, error: Exception) -> ServerError:
        """Says what came instead of an answer, and what to look at."""
        if isinstance(error, httpx.ConnectError | httpx.UnsupportedProtocol):
            words = f"nobody can be reached there ({error}): is the address right, and the server up?"
        elif isinstance(error, TimeoutError | httpx.TimeoutException):
            words = f"no whole answer within {self._timeout_s:g} s: is the server alive? --timeout gives it longer"
        elif isinstance(error, httpx.HTTPError):
            words = f"the connection broke ({error!r}): did the server end? Its log says why"
        else:
            words = str(error) if type(error) is ValueError else f"this is no OpenAI-compatible answer ({error!r})"
        return ServerError(f"{self.url}: {what}: {words}", scope=Scope.SERVER)


def _check(status: int, words: str) -> None:
    """Raise ValueError with the server's own words unless the status is 200."""
    if status != httpx.codes.OK:
        hint = " (the API key comes from OPENAI_API_KEY or BASELINE_API_KEY)" if status in _NO_ENTRY else ""
        raise ValueError(f"status {status}{hint}: {words[:500]}")


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
            one["token"], _nats(one["logprob"]), tuple((o["token"], _nats(o["logprob"])) for o in one["top_logprobs"])
        )
        for one in (logprobs or {}).get("content") or ()
    ]


def _nats(logprob: float | None) -> float:
    """JSON has no word for "not a number": vLLM writes null, and a model with a broken state makes such."""
    return float("nan") if logprob is None else float(logprob)
