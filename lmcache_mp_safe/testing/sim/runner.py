"""A model runner in small: what vLLM's V1 runner reads and writes in a step, as data.

For each request of a step it works out which pages the step reads, which words it writes, and how align mode moves
recurrent states. `device.py` carries that out on every rank's compute stream, in this order:

    migrate      the running state moves to the step's own column (`preprocess_mamba`)
    ------------ the connector's fence is recorded here
    forward      check what is read, write one word a token and a state a row
    ------------ the sampled tokens are known on the host
    settle       verification has shown how many drafts hold; the state of a boundary that was passed moves to the
                 boundary's column (`postprocess_mamba`)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.output import SchedulerOutput

from lmcache_mp_safe.testing.sim.host import MAX_TOKENS
from lmcache_mp_safe.testing.sim.tokens import BLOCK, VOCABULARY, Chain, Words, follow, next_token

Table = NDArray[np.int64]


@dataclass(frozen=True)
class Move:
    """A state page that is copied to another block, in one group."""

    group: int
    source: int
    target: int


@dataclass(frozen=True)
class Work:
    """What one request's share of a step does. Positions [0, start) are read, [start, end) are computed.

    Attributes:
        tags: of positions [0, end), drafts included.
        tables: block ids by group.
        migrate, settle: moves of states before the forward, and after verification.
        read_state: block with the state after `start` tokens, by group; absent where there is none yet.
        write_states: (group, block, tokens that the state has seen).
    """

    request_id: str
    start: int
    end: int
    tags: Words
    tables: tuple[Table, ...]
    migrate: tuple[Move, ...] = ()
    read_state: tuple[tuple[int, int], ...] = ()
    write_states: tuple[tuple[int, int, int], ...] = ()
    settle: tuple[Move, ...] = ()


@dataclass
class _Request:
    """What the runner keeps of a request.

    Attributes:
        state_column: column of the running state; None before the first step.
        accepted: drafts that held in the last step, and one.
        drafts: for the next step.
    """

    chain: Chain
    computed: int
    tables: list[list[int]]
    state_column: int | None = None
    accepted: int = 1
    drafts: list[int] = field(default_factory=list)


class Runner:
    """The host's side of the model, shared by all ranks.

    Args:
        kinds: kind of each KV cache group.
        drafts: draft tokens a step.
        guess: chance of each draft to be right.
    """

    def __init__(self, kinds: Sequence[str], drafts: int, random: Random, *, guess: float = 0.6) -> None:
        self._kinds = tuple(kinds)
        self._drafts = drafts
        self._random = random
        self._guess = guess
        self._requests: dict[str, _Request] = {}

    def step(self, output: SchedulerOutput, salts: dict[str, str]) -> tuple[list[Work], dict[str, list[int]]]:
        """Work of each request in the step, and the tokens that are sampled."""
        self._update(output, salts)
        work: list[Work] = []
        sampled: dict[str, list[int]] = {}
        for request_id, count in output.num_scheduled_tokens.items():
            drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
            share, tokens = self._compute(request_id, count, len(drafts))
            work.append(share)
            sampled[request_id] = tokens
        return work, sampled

    def take_drafts(self, step: Iterable[str]) -> dict[str, list[int]]:
        """Draft tokens for the next step of the requests that were in this one. vLLM keeps no others: drafts for one
        that is preempted would be verified behind its whole prompt, and states would jump over a column."""
        requests = {request_id: self._requests[request_id] for request_id in step if request_id in self._requests}
        return {request_id: list(request.drafts) for request_id, request in requests.items() if request.drafts}

    # --- the scheduler's words --------------------------------------------------------------------------------------

    def _update(self, output: SchedulerOutput, salts: dict[str, str]) -> None:
        for request_id in output.finished_req_ids:
            self._requests.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            assert new.prompt_token_ids is not None
            chain = Chain(salts[new.req_id], new.prompt_token_ids, MAX_TOKENS)
            self._requests[new.req_id] = _Request(chain, new.num_computed_tokens, [list(ids) for ids in new.block_ids])
        cached = output.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            request = self._requests[request_id]
            blocks = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                assert blocks is not None
                chain = Chain(salts[request_id], cached.all_token_ids[request_id], MAX_TOKENS)
                computed = cached.num_computed_tokens[index]
                self._requests[request_id] = _Request(chain, computed, [list(ids) for ids in blocks])
            elif blocks is not None:
                for table, ids in zip(request.tables, blocks, strict=True):
                    table.extend(ids)

    # --- one request ------------------------------------------------------------------------------------------------

    def _compute(self, request_id: str, count: int, num_drafts: int) -> tuple[Work, list[int]]:
        request = self._requests[request_id]
        chain, start = request.chain, request.computed
        end = start + count
        known = end - num_drafts
        assert known <= len(chain), f"{request_id}: a step up to token {end}, but only {len(chain)} are known"
        # Rows that vLLM pads with placeholders have no draft: whatever is there is rejected.
        drafts = (request.drafts + [0] * num_drafts)[:num_drafts]
        tags = chain.with_drafts(drafts)[:end] if num_drafts else chain.tags(end)
        sampled = self._sample(chain, drafts) if known == len(chain) else []
        accepted = max(len(sampled), 1)
        states = [group for group, kind in enumerate(self._kinds) if kind == "state"]
        column, source = self._columns(request, start, end)
        tables = request.tables
        migrate: tuple[Move, ...] = ()
        if source is not None:
            migrate = tuple(Move(g, tables[g][source], tables[g][column]) for g in states)
            request.accepted = 1
        read = tuple((g, tables[g][column + request.accepted - 1]) for g in states if start)
        rows = range(num_drafts + 1)
        written = tuple((g, tables[g][column + row], known + row) for g in states for row in rows)
        request.accepted = accepted
        settle = self._settle(request, states, column, known)
        if sampled:
            chain.extend(sampled)
            request.computed = len(chain) - 1
            request.drafts = self._draft(chain)
        else:
            request.computed = end
        work = Work(
            request_id,
            start,
            end,
            tags,
            tuple(np.array(table, np.int64) for table in tables),
            migrate,
            read,
            written,
            settle,
        )
        return work, sampled

    def _columns(self, request: _Request, start: int, end: int) -> tuple[int, int | None]:
        """Column of the step's running state, and the one that it has to come from, drafts that held counted."""
        before = request.state_column
        if before is None:
            before = (start - 1) // BLOCK
        column = -(-end // BLOCK) - 1
        request.state_column = column
        if before in (-1, column):
            return column, None
        return column, before + request.accepted - 1

    def _settle(self, request: _Request, states: Sequence[int], column: int, running: int) -> tuple[Move, ...]:
        """The moves after verification. `running`: tokens that the state in the running column has seen."""
        boundary = (running + request.accepted - 1) // BLOCK * BLOCK
        if boundary < running:
            return ()
        offset, target = boundary - running, boundary // BLOCK - 1
        tables = request.tables
        if target == column:
            request.accepted = 1
            if offset == 0:
                return ()
        return tuple(Move(g, tables[g][column + offset], tables[g][target]) for g in states)

    def _sample(self, chain: Chain, drafts: Sequence[int]) -> list[int]:
        """The drafts that hold, and what the model says after them."""
        tokens: list[int] = []
        tag = chain.tag(len(chain))
        for draft in [*drafts, None]:
            token = next_token(tag)
            tokens.append(token)
            if token != draft:
                break
            tag = follow(tag, token)
        return tokens

    def _draft(self, chain: Chain) -> list[int]:
        drafts: list[int] = []
        tag = chain.tag(len(chain))
        for _ in range(self._drafts):
            right = self._random.random() < self._guess
            drafts.append(next_token(tag) if right else self._random.randrange(1, VOCABULARY + 1))
            tag = follow(tag, drafts[-1])
        return drafts
