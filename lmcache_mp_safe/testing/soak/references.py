"""What recomputing answers: an engine of its own, in a process of its own, without a connector.

Every request has a salt of its own there, so that nothing is reused. Runs on a thread, beside the engine under test.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Sequence
from types import TracebackType

from lmcache_mp_safe.testing.engine import Answer, EngineSpec
from lmcache_mp_safe.testing.engine_worker import EngineProcess
from lmcache_mp_safe.testing.oracle import Tokens

_END: tuple[int, Tokens] = (-1, ())
_JOIN_S = 120.0


class References:
    """Recomputes prompts in the order in which they were asked for; `take` has what is done."""

    def __init__(self, spec: EngineSpec, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._batch = spec.max_num_seqs
        self._engine = EngineProcess(spec)
        self._numbers = itertools.count()
        self._asked: queue.Queue[tuple[int, Tokens]] = queue.Queue()
        self._done: queue.Queue[tuple[int, Answer] | Exception] = queue.Queue()
        self._thread = threading.Thread(target=self._work, name="references", daemon=True)
        self._thread.start()

    def ask(self, prompt: Tokens) -> int:
        """Have it recomputed. Returns a ticket for the answer."""
        ticket = next(self._numbers)
        self._asked.put((ticket, prompt))
        return ticket

    def take(self) -> list[tuple[int, Answer]]:
        """Answers since the last call, with their tickets.

        Raises:
            Exception: the reference engine failed.
        """
        taken = []
        while not self._done.empty():
            done = self._done.get()
            if isinstance(done, Exception):
                raise done
            taken.append(done)
        return taken

    def _work(self) -> None:
        try:
            while asked := self._next():
                for answer in self._recompute(asked):
                    self._done.put(answer)
        except Exception as error:
            self._done.put(error)

    def _next(self) -> list[tuple[int, Tokens]]:
        """Waits for one, and takes what else is there; nothing at the end."""
        asked = [self._asked.get()]
        while len(asked) < self._batch and not self._asked.empty():
            asked.append(self._asked.get())
        return [] if _END in asked else asked

    def _recompute(self, asked: Sequence[tuple[int, Tokens]]) -> list[tuple[int, Answer]]:
        salts = [f"reference-{ticket}" for ticket, _ in asked]
        answers = self._engine.generate([prompt for _, prompt in asked], self._max_tokens, salts=salts)
        reused = sum(answer.cached_tokens for answer in answers)
        if reused:
            raise ValueError(f"{reused} tokens of a reference were not computed")
        return [(ticket, answer) for (ticket, _), answer in zip(asked, answers, strict=True)]

    def __enter__(self) -> References:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._asked.put(_END)
        self._thread.join(_JOIN_S)
        self._engine.close()
