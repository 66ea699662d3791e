"""Ask a vLLM server two questions about one long text, and print how much of the second prompt came from the cache.

python examples/client.py --url http://127.0.0.1:8000

vLLM's own prefix cache answers first; what comes from the LMCache server is seen after a restart of vLLM.
`--enable-prompt-tokens-details` makes vLLM report the cached tokens.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from typing import Any

TEXT = "The pool is shared, and each prefix is stored once. " * 400
QUESTIONS = ("What is shared?", "What is stored once?")


def call(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{url}{path}", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.loads(answer.read())


def ask(url: str, model: str, question: str) -> tuple[int, int | None]:
    """Prompt tokens, and those of them that were cached; None where vLLM does not say."""
    body = {"model": model, "prompt": f"{TEXT}\n{question}\n", "max_tokens": 16, "temperature": 0}
    usage = call(url, "/v1/completions", body)["usage"]
    details = usage.get("prompt_tokens_details") or {}
    return usage["prompt_tokens"], details.get("cached_tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    url = parser.parse_args().url.rstrip("/")
    model = call(url, "/v1/models")["data"][0]["id"]
    for question in QUESTIONS:
        tokens, cached = ask(url, model, question)
        print(f"{question} {tokens} prompt tokens, {'unknown' if cached is None else cached} cached")


if __name__ == "__main__":
    main()
