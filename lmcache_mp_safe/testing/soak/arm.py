"""One arm of the soak: users, an engine under test, its server, and a second engine that recomputes every answer."""

from __future__ import annotations

import os
import random
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from lmcache_mp_safe.testing.engine import Answer, Engine, EngineSpec, Speculation
from lmcache_mp_safe.testing.leftovers import (
    Inventory,
    anonymous_bytes,
    inventory,
    leftovers,
    server_inventory,
    settled,
)
from lmcache_mp_safe.testing.models import write_model
from lmcache_mp_safe.testing.oracle import Tokens, compare
from lmcache_mp_safe.testing.server import LMCacheServer
from lmcache_mp_safe.testing.soak.memory import Growth
from lmcache_mp_safe.testing.soak.mutant import load_wrong_states
from lmcache_mp_safe.testing.soak.references import References
from lmcache_mp_safe.testing.soak.report import ArmReport
from lmcache_mp_safe.testing.soak.trouble import Pace, Trouble
from lmcache_mp_safe.testing.soak.users import Habits, User, system_prompts

_USERS = 12
_AT_ONCE = 5  # requests under way, one more than run together
_RUNNING = 4
# Few enough that what a user said is gone from vLLM's own cache when the user comes back, and that requests preempt
# each other; the longest conversation fits.
_GPU_BLOCKS = {"none": 26, "ngram": 30, "mtp": 34}
# Holds what the users say in some minutes; after that the server evicts.
_POOL_GB = 0.06
_DEADLINES = {"lmcache.mp.mq_timeout": 3, "lmcache.mp.heartbeat_interval": 2, "lmcache.mp.safe.lookup_timeout_s": 2}
_SALT = "soak"
_BACKLOG = 2 * _RUNNING  # answers that wait for their reference; then users wait too
_ASK_AGAIN = 3
_LAST_ANSWERS_S = 300.0
_SAMPLE_S = 2.0
_START_S = 300.0  # of a server, on a machine that is busy with all of this
_WARM_S = 120.0
_SERVER_WARM_S = 30.0
_TALK_S = 60.0
_MIB = 1 << 20


@dataclass(frozen=True)
class Plan:
    """What one arm is to do."""

    speculation: Speculation
    seconds: float
    seed: int
    with_mutant: bool = False

    @property
    def pace(self) -> Pace:
        gap_s = min(100.0, max(15.0, self.seconds / 6))
        return Pace((gap_s / 2, gap_s), no_kills_after_s=0.6 * self.seconds)

    @property
    def warm_s(self) -> float:
        return min(_WARM_S, self.seconds / 3)


@dataclass
class _Flight:
    """A request under way.

    Attributes:
        ticket: of its reference. steps_left: until the user gives up; None for one who waits.
    """

    user: User
    prompt: Tokens
    ticket: int
    steps_left: int | None
    attempts: int = 0


def run_arm(plan: Plan) -> ArmReport:
    """The whole arm, in this process. Never raises: a failure is part of the report."""
    report = ArmReport(plan.speculation)
    started = time.monotonic()
    try:
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="lmcache-mp-safe-soak-"))
            model = write_model("hybrid", Path(folder) / "model")
            server = stack.enter_context(LMCacheServer(l1_size_gb=_POOL_GB, start_timeout_s=_START_S))
            habits = Habits()
            references = stack.enter_context(
                References(_spec(plan, model, None), habits.answer_tokens)  # recomputes, without a connector
            )
            engine = stack.enter_context(Engine(_spec(plan, model, server)))
            _Arm(plan, habits, engine, server, references, report).run()
    except Exception:
        report.failure = traceback.format_exc()
    report.seconds = time.monotonic() - started
    return report


def _spec(plan: Plan, model: Path, server: LMCacheServer | None) -> EngineSpec:
    address = {} if server is None else {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server.port}
    return EngineSpec(
        str(model),
        speculation=plan.speculation,
        connector=None if server is None else "safe",
        connector_extra=address | _DEADLINES if server else {},
        max_num_seqs=_RUNNING,
        max_model_len=6400,
        num_gpu_blocks_override=None if server is None else _GPU_BLOCKS[plan.speculation],
    )


class _Arm:
    def __init__(
        self,
        plan: Plan,
        habits: Habits,
        engine: Engine,
        server: LMCacheServer,
        references: References,
        report: ArmReport,
    ) -> None:
        self._plan, self._habits, self._report = plan, habits, report
        self._console = Console()
        self._engine, self._server, self._references = engine, server, references
        systems = system_prompts(habits, plan.seed)
        self._users = [User(systems, habits, random.Random(f"{plan.seed}-{number}")) for number in range(_USERS)]
        self._rng = random.Random(plan.seed)
        self._idle = list(self._users)
        self._flights: dict[str, _Flight] = {}
        self._waiting: dict[int, Answer] = {}
        self._recomputed: dict[int, Answer] = {}
        self._engine_memory = Growth(plan.warm_s)
        self._server_memory = Growth(_SERVER_WARM_S)
        self._server_life = 0.0

    def run(self) -> None:
        before = self._first_hit()
        if self._plan.with_mutant:
            load_wrong_states(self._engine)
        started = time.monotonic()
        trouble = Trouble(self._server, self._plan.pace, self._rng, started)
        self._engine_memory.begin()
        next_sample, next_talk = started, started + _TALK_S
        while (now := time.monotonic()) < started + self._plan.seconds:
            self._submit()
            self._step()
            trouble.poll(now)
            if now >= next_sample:
                next_sample = now + _SAMPLE_S
                self._sample(now - started, trouble, now)
            if now >= next_talk:
                next_talk = now + _TALK_S
                self._say(now - started)
        trouble.end()
        self._finish(trouble, before)

    def _first_hit(self) -> Inventory:
        """What the engine holds once everything that is made once was made."""
        prompt = self._users[0].prompt()
        self._users[0].gave_up()
        for _ in range(2):
            (answer,) = self._engine.generate([prompt], self._habits.answer_tokens, salts=["first"])
            self._engine.drain(30)
            self._engine.reset_prefix_cache()
        if not answer.external_tokens:
            raise ValueError("the second request had no hit: the machine is too busy, or the connector does not work")
        return inventory(self._engine)

    # --- users --------------------------------------------------------------------

    def _submit(self) -> None:
        while self._idle and len(self._flights) < _AT_ONCE and len(self._waiting) < _BACKLOG:
            user = self._idle.pop(0)
            prompt = user.prompt()
            steps = self._rng.randint(0, 12) if user.aborts() else None
            self._fly(_Flight(user, prompt, self._references.ask(prompt), steps))

    def _fly(self, flight: _Flight) -> None:
        request_id = self._engine.submit(flight.prompt, self._habits.answer_tokens, salt=_SALT)
        self._flights[request_id] = flight

    def _step(self) -> None:
        if not self._flights:
            time.sleep(0.002)  # every user waits for a reference
        for answer in self._engine.step():
            self._answered(self._flights.pop(answer.request_id), answer)
        for request_id, flight in list(self._flights.items()):
            if flight.steps_left is not None:
                flight.steps_left -= 1
                if flight.steps_left < 0:
                    self._abort(request_id, flight)
        self._compare()

    def _abort(self, request_id: str, flight: _Flight) -> None:
        self._engine.abort(request_id)
        del self._flights[request_id]
        self._report.aborts += 1
        flight.user.gave_up()
        self._idle.append(flight.user)

    def _answered(self, flight: _Flight, answer: Answer) -> None:
        report = self._report
        report.requests += 1
        report.prompt_tokens += answer.prompt_tokens
        report.local_tokens += answer.local_tokens
        report.hit_tokens += answer.external_tokens
        report.hits += answer.external_tokens > 0
        left = answer.prompt_tokens - answer.cached_tokens
        report.partial_hits += answer.external_tokens > 0 and left > self._habits.block_tokens
        if answer.preemptions:
            report.preempted += 1
            if flight.attempts < _ASK_AGAIN:
                flight.attempts += 1
                self._fly(flight)
                return
        else:
            self._waiting[flight.ticket] = answer
        flight.user.told(answer.token_ids)
        self._idle.append(flight.user)

    def _compare(self) -> None:
        self._recomputed.update(self._references.take())
        for ticket in self._waiting.keys() & self._recomputed.keys():
            answer = self._waiting.pop(ticket)
            divergence = compare(self._recomputed[ticket], answer)
            self._report.compared += 1
            if divergence is not None:
                cached = f"{answer.local_tokens} local and {answer.external_tokens} external of {answer.prompt_tokens}"
                self._report.divergences.append(f"{divergence}; tokens: {cached}")
        owed = {flight.ticket for flight in self._flights.values()}
        self._recomputed = {ticket: answer for ticket, answer in self._recomputed.items() if ticket in owed}

    # --- the end ------------------------------------------------------------------

    def _finish(self, trouble: Trouble, before: Inventory) -> None:
        report, half = self._report, self._engine.connector.scheduler_half
        self._wait(lambda: not self._flights and not self._waiting, "answers or references are missing")
        self._wait(lambda: bool(half.wire.up), "the connector did not come back to its server")
        self._engine.drain(30)
        report.left = {
            **leftovers(self._engine, before),
            **settled(lambda: server_inventory(self._server), Inventory(), 20.0),
        }
        report.server_kills, report.server_freezes = trouble.kills, trouble.freezes
        report.counters = dict(half.counters)
        report.engine_mib = self._engine_memory.most_bytes // _MIB
        report.server_mib = self._server_memory.most_bytes // _MIB
        report.engine_growth_mib = _mib(self._engine_memory.grown_bytes)
        report.server_growth_mib = _mib(self._server_memory.grown_bytes)

    def _wait(self, done: Callable[[], bool], otherwise: str) -> None:
        half = self._engine.connector.scheduler_half
        end = time.monotonic() + _LAST_ANSWERS_S
        while not done():
            if time.monotonic() > end:
                raise TimeoutError(f"{otherwise} after {_LAST_ANSWERS_S:.0f} s; {half.wire.why_down}")
            self._step()
            half._advance(time.monotonic())

    # --- memory and words ---------------------------------------------------------

    def _sample(self, age_s: float, trouble: Trouble, now: float) -> None:
        self._engine_memory.add(age_s, anonymous_bytes(os.getpid()))
        if not trouble.server_is_well:
            return
        if trouble.server_started != self._server_life:
            self._server_life = trouble.server_started
            self._server_memory.begin()
        self._server_memory.add(now - self._server_life, anonymous_bytes(self._server.pid))

    def _say(self, age_s: float) -> None:
        report = self._report
        self._console.print(
            f"{report.speculation}, {age_s / 60:.0f} min: {report.requests} answers, {report.hits} with hits,"
            f" {report.compared} compared, {len(report.divergences)} diverged",
            highlight=False,
        )


def _mib(size: int | None) -> float | None:
    return None if size is None else round(size / _MIB, 1)
