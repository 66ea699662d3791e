"""One simulated world: an engine, a network, a server, and the commands that move them. Everything follows from the
settings and the commands, so a trace of commands is the run."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from random import Random

from vllm.v1.core.sched.output import SchedulerOutput

from lmcache_mp_safe.connector import PlanMetadata
from lmcache_mp_safe.contract import StepReport
from lmcache_mp_safe.scheduler.half import SchedulerHalf
from lmcache_mp_safe.testing.fake_server import Call, FakeServer, SharedMemory
from lmcache_mp_safe.testing.sim import invariants as check
from lmcache_mp_safe.testing.sim.engine import Engine
from lmcache_mp_safe.testing.sim.faults import Faults
from lmcache_mp_safe.testing.sim.host import SimConnector
from lmcache_mp_safe.testing.sim.invariants import InvariantError, first
from lmcache_mp_safe.testing.sim.network import Network, NetworkMaker
from lmcache_mp_safe.testing.sim.settings import Settings
from lmcache_mp_safe.testing.sim.tokens import prompt
from lmcache_mp_safe.testing.sim.trace import CommandError, Trace, words_of
from lmcache_mp_safe.testing.sim.watch import Acknowledgements, Jobs, Payloads
from lmcache_mp_safe.wire import SessionId

SERVER_CHUNK = 8  # tokens; the shortest that the connector takes, as each costs time
_OBJECT_STEP = 4096
_STEP_S = (0.001, 0.02, 0.2, 0.5)  # what a step takes
_DRAIN_STEP_S = 0.25
_PATIENCE = 600  # steps in which at least one request has to end
_SETTLE_STEPS = 400  # until nothing is under way any more
# Seconds before each visit. The first ones are together longer than the connector waits for an answer. All are longer
# than the server keeps locks: while those of a lost connection fill a small pool, the next one has no room to prove it.
_VISITS_S = (40.0, 40.0, 40.0, 40.0, 40.0, 450.0, 40.0)
_LOCK_TIME_S = 700.0  # longer than any of the server's own times


class World:
    """A world and what has been seen of it.

    Attributes:
        now: seconds.
        trace: what was done and what came out.
        counts: what happened, by name.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.now = 1000.0
        self.counts: Counter[str] = Counter()
        self.trace = Trace(settings.line())
        self._number = 0
        self._out: list[str] = []
        self.memory = SharedMemory(settings.slots * settings.ranks * _OBJECT_STEP)
        server = FakeServer(
            lambda: self.now,
            self.memory,
            shm_name=self.memory.name,
            server_chunk=SERVER_CHUNK,
            lookup_s=settings.lookup_s,
        )
        self.network = Network(server, lambda: self.now)
        self._hearing = contextlib.ExitStack()
        self.caught = self._hearing.enter_context(check.heard())
        self.engine = Engine(settings, lambda: self.now, lambda: NetworkMaker(self.network))
        self.faults = Faults(self)
        self.jobs = Jobs(self.engine.pool, settings.ranks)
        self.payloads = Payloads(self.engine.ranks, self.engine.pool)
        self.acknowledged = Acknowledgements()
        self.watermarks = check.Watermarks(self.acknowledged, self.jobs.loaded, settings.chunk_tokens, SERVER_CHUNK)
        self.engine.planned = self._planned
        self.engine.reported = self._reported
        self.network.answered = self._answered

    @property
    def half(self) -> SchedulerHalf | None:
        connector = self.engine.connector
        return connector.scheduler_half if isinstance(connector, SimConnector) else None

    # --- commands ---------------------------------------------------------------------------------------------------

    def do(self, command: str) -> str:
        """Carry a command out.

        Returns:
            What came out.

        Raises:
            InvariantError: an invariant does not hold afterwards.
            CommandError: there is no such command.
        """
        self._number += 1
        self._out = []
        random = Random(f"{self.settings.seed} {self._number}")
        verb, plain, values = words_of(command)
        self.trace.entries.append((command, ""))
        try:
            self._carry_out(verb, plain, values, random)
            self._check()
        except (InvariantError, CommandError):
            raise
        except Exception as error:
            raise InvariantError("engine", f"{type(error).__name__}: {error}") from error
        finally:
            self.trace.entries[-1] = (command, "; ".join(self._out))
        return self.trace.entries[-1][1]

    def _carry_out(self, verb: str, plain: list[str], values: dict[str, str], random: Random) -> None:
        match verb:
            case "arrive":
                salt = values.get("salt", "")
                tokens = prompt(values["prompt"], salt)
                self._arrive(plain[0], tokens, int(values.get("max", "8")), salt)
            case "abort":
                self.engine.abort(plain[0])
            case "step":
                self.counts["steps with faults"] += 1
                self._step(random, random.choice(_STEP_S))
            case "fault":
                self._out.append(self.faults.do(plain[0], values, random))
            case "calm":
                self.faults.calm()
            case "drain":
                self._drain(random)
            case _:
                raise CommandError(f"no command {verb!r}: arrive, abort, step, fault, calm or drain")

    def _arrive(self, name: str, tokens: list[int], max_tokens: int, salt: str) -> None:
        if not self.engine.arrive(name, tokens, max_tokens, salt):
            self._out.append("its name is taken")
            return
        self.counts["requests"] += 1
        self.payloads.arrived(self.engine.scheduler.requests[name])
        self._out.append(f"{len(tokens)} tokens")

    def _step(self, random: Random, seconds: float) -> None:
        self.counts["steps"] += 1
        self.now += seconds
        self.network.pump(random)
        before = set(self.engine.scheduler.requests)
        if self.engine.busy:
            self._told(self.engine.step(random))
        else:
            self.engine.take_aborts()
        ended = sorted(before - set(self.engine.scheduler.requests))
        self._out += [f"{name} ended" for name in ended]
        self.counts["ended"] += len(ended)
        for rank in self.engine.ranks:
            if random.random() < self.settings.pace:
                rank.run_some(random, 60)

    def _told(self, output: SchedulerOutput | None) -> None:
        if output is None:
            return
        counts = " ".join(f"{name}+{count}" for name, count in output.num_scheduled_tokens.items())
        preempted = sorted(output.preempted_req_ids or ())
        self.counts["preemptions"] += len(preempted)
        self.counts["drafts"] += sum(map(len, output.scheduled_spec_decode_tokens.values()))
        self._out += [part for part in (counts, *(f"{name} preempted" for name in preempted)) if part]

    def _drain(self, random: Random) -> None:
        """Faults have stopped: everything ends, and nothing is left."""
        self._finish_requests(random)
        self._settle(random)
        if not self.settings.tidy:
            self._look_in_again(random)
        first("leak", check.leftovers_of_the_engine(self.engine, self.half, self.jobs))
        if self.half is None:
            return
        if not self.settings.tidy:
            self.now += _LOCK_TIME_S
            self.network.server.tick()
        first("leak", check.leftovers_on_the_server(self.network.server))
        first("wrong object", check.wrong_objects(self.network.server, self.memory, self.half, self.payloads))
        self._out.append("at rest")

    def _finish_requests(self, random: Random) -> None:
        waited = 0
        while self.engine.scheduler.get_num_unfinished_requests():
            ended = self.counts["ended"]
            self._step(random, _DRAIN_STEP_S)
            self._check()
            waited = 0 if self.counts["ended"] > ended else waited + 1
            if waited == _PATIENCE:
                self._give_way()
                waited = 0

    def _give_way(self) -> None:
        """Somebody has to abort a request where vLLM has run into a dead end of its own.

        Raises:
            InvariantError: it is not vLLM's own.
        """
        names = check.dead_end(self.engine, self.half, self.jobs)
        if not names:
            raise InvariantError("hang", f"{sorted(self.engine.scheduler.requests)} do not end")
        self.counts["dead ends of vLLM"] += 1
        self._out.append(f"vLLM has loaded {' '.join(names)} and has room for none")
        self.engine.abort(names[0])

    def _settle(self, random: Random) -> None:
        """What goes on when the last request has ended."""
        for _ in range(_SETTLE_STEPS):
            if not self.engine.busy and self.network.idle:
                return
            self._step(random, _DRAIN_STEP_S)
            for rank in self.engine.ranks:
                rank.finish()
        raise InvariantError("hang", "the engine goes on stepping with nothing to do")

    def _look_in_again(self, random: Random) -> None:
        """An idle engine calls no hook. What was lost or late is settled as the next requests come."""
        for seconds in _VISITS_S:
            self.now += seconds
            self._arrive("visitor", prompt("0:9", ""), 1, "")
            while self.engine.scheduler.get_num_unfinished_requests():
                self._step(random, _DRAIN_STEP_S)
            self._settle(random)

    def reset_cache(self) -> str:
        scheduler = self.engine.scheduler
        idle = not scheduler.requests and not self.engine.busy
        done = scheduler.reset_prefix_cache(reset_connector=self.half is not None)
        if not (done and idle):
            return "the model stays the same"
        for rank in self.engine.ranks:
            rank.change_weights()
        self.payloads.expected.clear()
        return "the model has other weights"

    # --- what is seen -----------------------------------------------------------------------------------------------

    def _planned(self, output: SchedulerOutput) -> None:
        meta = output.kv_connector_metadata
        if not isinstance(meta, PlanMetadata):
            return
        plan = meta.plan
        self.jobs.planned(plan)
        self.payloads.planned(plan.stores)
        self._out += [f"load {job.job_id} of {job.request_id}" for job in plan.loads]
        if plan.stores:
            self._out.append(f"store {','.join(str(job.job_id) for job in plan.stores)}")

    def _reported(self, rank: int, report: StepReport) -> None:
        self.jobs.reported(rank, report)
        for job in report.jobs:
            self._out.append(f"job {job.job_id} {job.outcome.value} on rank {rank}")

    def _answered(self, call: Call) -> None:
        half = self.half
        if half is None:
            return
        to_a_store = call.operation == "query_prefetch_status" and _is_of_a_store(half, call.arguments[0])
        self.acknowledged.answered(call, to_a_store=to_a_store, chunk=SERVER_CHUNK)

    def _check(self) -> None:
        first("wrong tag", check.wrong_tags(self.engine))
        first("block", check.misused_blocks(self.jobs))
        first("exception", check.exceptions(self.caught))
        first("pins", check.unaccounted_pins(self.engine, self.half, len(self.faults.squeezed)))
        if self.half is not None:
            first("watermark", self.watermarks.check(self.engine, self.half))

    # --- the end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the processes."""
        try:
            if self.half is not None:
                self.half.shutdown(0.0)
            for rank in self.engine.ranks:
                rank.finish()
                rank.worker.shutdown()
        finally:
            self._hearing.close()
            self.memory.close()


def _is_of_a_store(half: SchedulerHalf, session_name: str) -> bool:
    process, _, number = session_name.rpartition("-")
    live = half._live
    return live is not None and live.wire._process == process and live.stores.owns(SessionId(int(number)))


@contextlib.contextmanager
def world(settings: Settings) -> Iterator[World]:
    """A world that is taken down in any case."""
    made = World(settings)
    try:
        yield made
    finally:
        made.close()
