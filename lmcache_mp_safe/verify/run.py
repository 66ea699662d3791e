"""The run: rounds of sessions, each asked four times.

baseline   recomputed: every request has a cache salt of its own
control    the same again; what differs here is the baseline's own noise
first      the server under test, with the run's salt: fills the cache, and hits what sessions share
again      the same requests, vLLM's own cache emptied before, where the server allows it: external hits
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from lmcache_mp_safe.verify.checks import NEAR_TIE_NATS, Answer, Comparison, compare
from lmcache_mp_safe.verify.client import Client
from lmcache_mp_safe.verify.judge import Judgement, judge
from lmcache_mp_safe.verify.traffic import Request, Session, rounds

_NO_COUNTS = "The server does not say how many tokens were cached: start it with --enable-prompt-tokens-details."
_NO_RESET = (
    "The server's own prefix cache could not be emptied, so a hit may be local or external: start it with "
    "VLLM_SERVER_DEV_MODE=1 to have external hits only in the last pass. Never do that on a public port."
)


@dataclass(frozen=True)
class Settings:
    """How much is asked, and how. `requests` counts prompts, each of which is asked four times."""

    requests: int | None = 60
    minutes: float | None = None
    concurrency: int = 4
    max_tokens: int = 64
    near_tie_nats: float = NEAR_TIE_NATS


@dataclass(frozen=True)
class Row:
    """One prompt: its four answers and three comparisons with the first of them."""

    request: Request
    baseline: Answer
    first: Answer
    again: Answer
    control_comparison: Comparison
    first_comparison: Comparison
    again_comparison: Comparison


@dataclass
class Result:
    """Everything that was measured."""

    url: str
    baseline_url: str
    model: str
    settings: Settings
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def tested(self) -> list[tuple[Row, Answer, Comparison]]:
        """The answers of the server under test, in the order of the rows."""
        first = [(row, row.first, row.first_comparison) for row in self.rows]
        return first + [(row, row.again, row.again_comparison) for row in self.rows]

    @property
    def hits(self) -> int | None:
        counts = [answer.cached_tokens for _, answer, _ in self.tested()]
        known = [count for count in counts if count is not None]
        return sum(count > 0 for count in known) if known else None

    def judgement(self) -> Judgement:
        return judge(
            [comparison for _, _, comparison in self.tested()], [row.control_comparison for row in self.rows], self.hits
        )


Progress = Callable[[str, int], None]  # what is being done; prompts done so far


async def run(
    subject: Client, baseline: Client, model: str, sessions: Iterable[Session], settings: Settings, progress: Progress
) -> Result:
    """Ask until the requests or the minutes are used up; a round that began is finished.

    Raises:
        ServerError: a server did not answer.
    """
    result = Result(subject.url, baseline.url, model, settings)
    began, salt = time.monotonic(), secrets.token_hex(8)
    end = None if settings.minutes is None else began + 60 * settings.minutes
    left = settings.requests
    for batch in rounds(iter(sessions), settings.concurrency):
        requests = list(batch)
        if left is not None:
            requests, left = _cut(batch, left)
        result.rows += await _round(subject, baseline, model, requests, settings, salt, began, result, progress)
        if left == 0 or (end is not None and time.monotonic() >= end):
            break
    result.seconds = time.monotonic() - began
    if result.hits is None:
        result.notes.append(_NO_COUNTS)
    return result


def _cut(batch: Iterable[Session], left: int) -> tuple[list[Session], int]:
    """The first `left` requests of a batch, whole sessions first."""
    kept = []
    for session in batch:
        kept.append(session[:left])
        left -= len(kept[-1])
    return [session for session in kept if session], left


async def _round(
    subject: Client,
    baseline: Client,
    model: str,
    sessions: list[Session],
    settings: Settings,
    salt: str,
    began: float,
    result: Result,
    progress: Progress,
) -> list[Row]:
    async def one_pass(name: str, client: Client, own_salts: bool) -> dict[Request, Answer]:
        progress(name, len(result.rows))
        answers: dict[Request, Answer] = {}

        async def hold(session: Session) -> None:
            for request in session:
                key = f"{salt}-{name}-{secrets.token_hex(8)}" if own_salts else salt
                answers[request] = await client.ask(
                    request, model=model, max_tokens=settings.max_tokens, salt=key, began=began
                )

        try:
            async with asyncio.TaskGroup() as group:
                for session in sessions:
                    group.create_task(hold(session))
        except ExceptionGroup as failures:  # one of them says enough
            raise failures.exceptions[0] from None
        return answers

    wanted = await one_pass("baseline", baseline, own_salts=True)
    control = await one_pass("control", baseline, own_salts=True)
    first = await one_pass("first", subject, own_salts=False)
    if not await subject.reset_cache() and _NO_RESET not in result.notes:
        result.notes.append(_NO_RESET)
    again = await one_pass("again", subject, own_salts=False)

    def against(request: Request, answer: Answer) -> Comparison:
        return compare(wanted[request], answer, settings.near_tie_nats)

    return [
        Row(
            request,
            wanted[request],
            first[request],
            again[request],
            against(request, control[request]),
            against(request, first[request]),
            against(request, again[request]),
        )
        for session in sessions
        for request in session
    ]
