"""The run: rounds of sessions, each asked four times.

baseline   recomputed: every request has a cache salt of its own
control    the baseline server again, with its own prefix cache: what differs here is its own noise. Where the server
           under test is its own baseline it is recomputed again, for its cache is what is under test
first      the server under test, with the run's salt: fills the cache, and hits what sessions share
again      the same requests, vLLM's own cache emptied before each turn, where the server allows it: external hits
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from lmcache_mp_safe.errors import ConfigError, ServerError
from lmcache_mp_safe.verify.checks import NEAR_TIE_NATS, Answer, Comparison, Kind, compare
from lmcache_mp_safe.verify.client import Client, Reset
from lmcache_mp_safe.verify.judge import Hits, Judgement, judge
from lmcache_mp_safe.verify.traffic import Request, Session, rounds

_NO_COUNTS = "The server does not say which answers were hits: start it with --enable-prompt-tokens-details."
_NO_EXTERNAL_COUNT = (
    "The server's /metrics do not count external hits, so a hit may have come from vLLM's own prefix cache: give the "
    "address of vLLM itself, not of a gateway before it."
)
_NO_EXTERNAL_HIT = (
    "No token came from the connector. Prompts had {least} to {most} tokens, and a hit needs a whole block of the "
    "model: ask longer ones with --words. Else see what `lmcache-mp-safe doctor` says, and the server's log."
)
_CONTROL_FAR = (
    "{far} of {rows} control answers leave the baseline far too: without this connector the baseline does not say the "
    "same twice. Where it is a server of its own, suspect vLLM's prefix cache."
)
_RESET_NOTES = {
    Reset.NO_ROUTE: "The server's own prefix cache could not be emptied, so most hits are local: start it with "
    "VLLM_SERVER_DEV_MODE=1 to have external hits in the last pass. Never do that on a public port.",
    Reset.REFUSED: "The server refused to empty its own prefix cache: blocks were held all the time. Other traffic "
    "does that; hits of the last pass may be local.",
}


@dataclass(frozen=True)
class Settings:
    """How much is asked, and how. `requests` counts prompts, each of which is asked four times."""

    requests: int | None = 60
    minutes: float | None = None
    concurrency: int = 4
    max_tokens: int = 64
    near_tie_nats: float = NEAR_TIE_NATS


@dataclass(frozen=True)
class Target:
    """A server, and the name under which it serves the model."""

    client: Client
    model: str


async def targets(subject: Client, baseline: Client, model: str | None, baseline_model: str | None) -> list[Target]:
    """The server under test and its baseline, with the name of the model on each.

    Raises:
        ServerError: one of them does not answer. ConfigError: a name is wanted that a server does not serve.
    """
    served = await subject.models()
    name = model or served[0]
    names = {"--model": (subject, served, name)}
    names["--baseline-model"] = (baseline, await baseline.models(), baseline_model or name)
    for option, (client, there, wanted) in names.items():
        if wanted not in there:
            serves = ", ".join(there)
            raise ConfigError(f"{client.url} does not serve {wanted!r} but: {serves}. Say which it is with {option}")
    return [Target(client, wanted) for client, _, wanted in names.values()]


@dataclass(frozen=True)
class Row:
    """One prompt: its four answers, and three comparisons with the first of them."""

    request: Request
    baseline: Answer
    control: Answer
    first: Answer
    again: Answer
    control_comparison: Comparison
    first_comparison: Comparison
    again_comparison: Comparison


@dataclass
class Result:
    """Everything that was measured.

    Attributes:
        external_tokens: prompt tokens that the connector brought, by the server's own metrics; None without these.
        ended_early: what a server failed with after some rounds; empty if nothing did.
    """

    url: str
    baseline_url: str
    model: str
    settings: Settings
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    external_tokens: int | None = None
    ended_early: str = ""

    def tested(self) -> list[tuple[Row, Answer, Comparison]]:
        """The answers of the server under test, in the order of the rows."""
        first = [(row, row.first, row.first_comparison) for row in self.rows]
        return first + [(row, row.again, row.again_comparison) for row in self.rows]

    @property
    def hits(self) -> Hits:
        counts = [answer.cached_tokens for _, answer, _ in self.tested()]
        known = [count for count in counts if count is not None]
        return Hits(sum(count > 0 for count in known) if known else None, self.external_tokens)

    def judgement(self) -> Judgement:
        tested = [comparison for _, _, comparison in self.tested()]
        control = [row.control_comparison for row in self.rows]
        control_has_hits = any(row.control.cached_tokens for row in self.rows)
        return judge(tested, control, self.hits, control_has_hits=control_has_hits)


Progress = Callable[[str, int], None]  # what is being done; prompts done so far


async def run(
    subject: Target, baseline: Target, sessions: Iterable[Session], settings: Settings, progress: Progress
) -> Result:
    """Ask until the requests or the minutes are used up; a round that began is finished.

    A server that fails after the first round ends the run early, with what was measured until then.

    Raises:
        ServerError: a server did not answer in the first round.
    """
    result = Result(subject.client.url, baseline.client.url, subject.model, settings)
    began = time.monotonic()
    asking = _Asking(subject, baseline, settings, began, lambda name: progress(name, len(result.rows)))
    end = None if settings.minutes is None else began + 60 * settings.minutes
    left = settings.requests
    try:
        before = await subject.client.external_tokens()
        for batch in rounds(iter(sessions), settings.concurrency):
            requests = list(batch)
            if left is not None:
                requests, left = _cut(batch, left)
            result.rows += await asking.round(requests)
            after = await subject.client.external_tokens()
            result.external_tokens = None if before is None or after is None else after - before
            if left == 0 or (end is not None and time.monotonic() >= end):
                break
    except ServerError as error:
        if not result.rows:
            raise
        result.ended_early = str(error)
    result.seconds = time.monotonic() - began
    result.notes = _notes(result, asking.resets)
    return result


def _cut(batch: Iterable[Session], left: int) -> tuple[list[Session], int]:
    """The first `left` requests of a batch, whole sessions first."""
    kept = []
    for session in batch:
        kept.append(session[:left])
        left -= len(kept[-1])
    return [session for session in kept if session], left


def _notes(result: Result, resets: Sequence[Reset]) -> list[str]:
    """What a reader has to know about this run, and what to do about it."""
    notes = [_RESET_NOTES[reset] for reset in _RESET_NOTES if reset in resets]
    if result.hits.answers is None:
        notes.append(_NO_COUNTS)
    if result.external_tokens is None:
        notes.append(_NO_EXTERNAL_COUNT)
    if result.external_tokens == 0:
        lengths = [row.baseline.prompt_tokens for row in result.rows]
        notes.append(_NO_EXTERNAL_HIT.format(least=min(lengths), most=max(lengths)))
    far = sum(row.control_comparison.kind is Kind.FAR for row in result.rows)
    if far:
        notes.append(_CONTROL_FAR.format(far=far, rows=len(result.rows)))
    if result.ended_early:
        notes.append(f"Ended early, what was measured until then is judged: {result.ended_early}")
    return notes


@dataclass
class _Asking:
    """The four passes of a round, and how emptying the cache for the last one went."""

    subject: Target
    baseline: Target
    settings: Settings
    began: float
    progress: Callable[[str], None]
    salt: str = field(default_factory=lambda: secrets.token_hex(8))
    resets: list[Reset] = field(default_factory=list)

    async def round(self, sessions: Sequence[Session]) -> list[Row]:
        alone = self.subject.client.url == self.baseline.client.url
        wanted = await self._pass("baseline", self.baseline, sessions, recompute=True)
        control = await self._pass("control", self.baseline, sessions, recompute=alone)
        first = await self._pass("first", self.subject, sessions, recompute=False)
        again: dict[Request, Answer] = {}
        for turn in itertools.zip_longest(*sessions):
            self.resets.append(await self.subject.client.reset_cache())
            beside = [(request,) for request in turn if request is not None]
            again |= await self._pass("again", self.subject, beside, recompute=False)

        rows = []
        for request in itertools.chain(*sessions):
            answers = control[request], first[request], again[request]
            found = (compare(wanted[request], answer, self.settings.near_tie_nats) for answer in answers)
            rows.append(Row(request, wanted[request], *answers, *found))
        return rows

    async def _pass(
        self, name: str, target: Target, sessions: Sequence[Session], *, recompute: bool
    ) -> dict[Request, Answer]:
        """The answers to all requests: sessions beside each other, the requests of one after each other."""
        self.progress(name)
        answers: dict[Request, Answer] = {}

        async def hold(session: Session) -> None:
            for request in session:
                salt = f"{self.salt}-{secrets.token_hex(8)}" if recompute else self.salt
                answers[request] = await target.client.ask(
                    request, model=target.model, max_tokens=self.settings.max_tokens, salt=salt, began=self.began
                )

        try:
            async with asyncio.TaskGroup() as group:
                for session in sessions:
                    group.create_task(hold(session))
        except ExceptionGroup as failures:  # one of them says enough
            raise failures.exceptions[0] from None
        return answers
