"""Where copies are submitted: inline, or on a thread beside the one that runs the model.

Submitting costs the driver more than an engine's hook may take (170 microseconds for a chunk of 112 runs on one H200),
and so do first touches of the server's memory. A hook only queues.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable
from concurrent.futures import Future
from queue import PriorityQueue
from threading import Lock, Thread
from typing import Any, Protocol

logger = logging.getLogger("vllm.lmcache_mp_safe.worker")

# CPython lets a thread wait this long for the interpreter while another one computes, 5 ms by default. A copy gives it
# up in a dozen calls of the driver, so beside an engine that polls, a load of 31 objects would wait 600 ms (seen).
_SWITCH_S = 0.0002

_END, _URGENT, _USUAL = range(3)
_Call = tuple[int, int, Future[None], Callable[..., None], tuple[Any, ...]]  # kind, number, result, function, arguments


class CopyQueue(Protocol):
    """Runs what it is given, one after the other, in the order given but for what is urgent."""

    def submit(self, act: Callable[..., None], *arguments: Any, urgent: bool = False) -> Future[None]:
        """Queue a call. One that is urgent goes before those that are not and have not begun."""

    def shutdown(self) -> None:
        """Finish the call that runs, and drop the others."""


class Inline:
    """Runs a call before `submit` returns."""

    def submit(self, act: Callable[..., None], *arguments: Any, urgent: bool = False) -> Future[None]:
        future: Future[None] = Future()
        _run(future, act, arguments)
        return future

    def shutdown(self) -> None:
        """Nothing is ever queued."""


class CopyThread:
    """One thread. While it has something to do, the process's threads take shorter turns.

    Args:
        enter: called by the thread first; makes the device its current one.
    """

    def __init__(self, enter: Callable[[], None]) -> None:
        self._usual_s = sys.getswitchinterval()
        self._short_s = min(self._usual_s, _SWITCH_S)
        self._turns = Lock()
        self._numbers = itertools.count()
        self._calls: PriorityQueue[tuple[int, int, Future[None], Callable[..., None], tuple[Any, ...]]] = (
            PriorityQueue()
        )
        self._thread = Thread(target=self._work, args=(enter,), name="lmcache_mp_safe-copies", daemon=True)
        self._thread.start()

    def submit(self, act: Callable[..., None], *arguments: Any, urgent: bool = False) -> Future[None]:
        future: Future[None] = Future()
        with self._turns:
            sys.setswitchinterval(self._short_s)
            self._calls.put((_URGENT if urgent else _USUAL, next(self._numbers), future, act, arguments))
        return future

    def shutdown(self) -> None:
        self._calls.put((_END, next(self._numbers), Future(), lambda: None, ()))
        self._thread.join()

    def _work(self, enter: Callable[[], None]) -> None:
        try:
            enter()
        except Exception:  # then each copy fails by itself, and is reported
            logger.exception("the copy thread cannot use its device")
        while True:
            with self._turns:
                if self._calls.empty():
                    sys.setswitchinterval(self._usual_s)
            kind, _, future, act, arguments = self._calls.get()
            if kind == _END:
                sys.setswitchinterval(self._usual_s)
                return
            _run(future, act, arguments)


def _run(future: Future[None], act: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    try:
        act(*arguments)
    except Exception as error:
        logger.exception("a call on the copy thread failed")
        future.set_exception(error)
    else:
        future.set_result(None)
