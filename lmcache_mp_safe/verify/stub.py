"""An OpenAI-compatible server inside this process, which can say one wrong thing: for the self-test and for tests.

Its "model" is a hash: the next token follows from the whole prompt and what was said, so that a change anywhere changes
everything behind it. No socket is opened.
"""

from __future__ import annotations

import enum
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import httpx

_WORDS = ("the", "table", "of", "every", "state", "holds", "one", "more", "block", "than", "its", "token")
_SURE, _UNSURE = -0.05, -4.0  # nats of the best token and of the others
_TIED = -0.69


class Fault(enum.StrEnum):
    WRONG_STATE = "wrong state"  # other tokens, said as surely as right ones
    REPLACEMENT = "U+FFFD"
    NEAR_TIE = "near-tie"  # two tokens that are as good as equal change places; no fault
    SHIFT = "shift"  # the same tokens, a little off: a state that is some tokens too old makes such
    DRIFT = "drift"  # the same tokens with other log-probabilities
    NOT_A_NUMBER = "not a number"  # the same tokens with no log-probability at all


@dataclass
class Stub:
    """Answers chats; the one with the number `faulty`, counted from 0, shows the fault."""

    fault: Fault | None = None
    faulty: int = -1
    asked: int = 0
    seen: set[str] = field(default_factory=set)
    says_cached: bool = True
    has_metrics: bool = True
    external_share: float = 1.0  # of the cached tokens, what a connector brought
    ends_after: int | None = None  # chats
    external_tokens: int = 0

    def transport(self) -> httpx.AsyncBaseTransport:
        return httpx.MockTransport(self._handle)

    def _handle(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "stub"}]})
        if request.url.path == "/metrics" and self.has_metrics:
            return httpx.Response(200, text=f"vllm:external_prefix_cache_hits_total {self.external_tokens}\n")
        if request.url.path != "/v1/chat/completions":
            return httpx.Response(404)
        body = json.loads(request.content)
        fault = self.fault if self.asked == self.faulty else None
        self.asked += 1
        if self.asked == self.ends_after:
            raise httpx.RemoteProtocolError("the server ended")
        return httpx.Response(200, text="".join(f"data: {event}\n\n" for event in self._stream(body, fault)))

    def _stream(self, body: dict[str, Any], fault: Fault | None) -> Iterable[str]:
        prompt = json.dumps(body["messages"])
        key = f"{body['cache_salt']}{json.dumps(body['messages'][0])}"
        length = len(prompt) // 4
        usage: dict[str, Any] = {"prompt_tokens": length}
        cached = length // 2 if key in self.seen else 0
        self.external_tokens += round(cached * self.external_share)
        if self.says_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        self.seen.add(key)
        count = min(int(body["max_tokens"]), 24)
        for place in range(count):
            token, logprobs = _token(prompt, place, fault)
            finish = "stop" if place == count - 1 else None
            choice = {"delta": {"content": token}, "logprobs": {"content": [logprobs]}, "finish_reason": finish}
            yield json.dumps({"choices": [choice]})
        yield json.dumps({"choices": [], "usage": usage})
        yield "[DONE]"


def _token(prompt: str, place: int, fault: Fault | None) -> tuple[str, dict[str, Any]]:
    """The token at this place, and its entry in the log-probabilities."""
    digest = hashlib.sha256(f"{prompt}{place}".encode()).digest()
    number = digest[0] % len(_WORDS)
    tied = place == 3
    words = [f" {_WORDS[(number + step) % len(_WORDS)]}" for step in range(3)]
    sure = [_TIED, _TIED - 0.01, _UNSURE] if tied else [_SURE, _UNSURE, _UNSURE - 1]
    if fault is Fault.WRONG_STATE and place >= 2:
        words = words[::-1]
    elif fault is Fault.REPLACEMENT and place == 5:
        words[0] = "\ufffd"
    elif fault is Fault.NEAR_TIE and tied:
        words[0], words[1] = words[1], words[0]
    elif fault is Fault.SHIFT:
        sure[0] -= 0.3
    elif fault is Fault.DRIFT:
        sure = [-2.0, -2.1, _UNSURE]
    logprobs = [None] * len(sure) if fault is Fault.NOT_A_NUMBER else sure
    best = [{"token": word, "logprob": logprob} for word, logprob in zip(words, logprobs, strict=True)]
    return words[0], {**best[0], "top_logprobs": best}
