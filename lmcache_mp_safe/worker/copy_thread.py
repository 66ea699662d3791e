"""Where copies are submitted and looked after: inline, or on a thread beside the one that runs the model.

Submitting costs the driver more than an engine's hook may take (170 microseconds for a chunk of 112 runs on one H200),
and so do first touches of the server's memory. Meanwhile the driver lets nobody else in, not even to ask whether a copy
is over. So a hook only queues, and all questions are asked by the thread, too.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, Protocol

from lmcache_mp_safe.turns import ShortTurns
from lmcache_mp_safe.worker.jobs import UnderWay

logger = logging.getLogger("vllm.lmcache_mp_safe.worker")

# How often it is asked whether copies are over. Each time the interpreter has to be taken from the engine's thread.
_LOOK_S = {UnderWay.NOTHING: None, UnderWay.STORES: 0.002, UnderWay.LOADS: 0.0005}

_Call = tuple[Callable[..., None], tuple[Any, ...]]  # function, arguments


class CopyQueue(Protocol):
    """Runs what it is given, one after the other, in the order given but for what is urgent."""

    def submit(self, act: Callable[..., None], *arguments: Any, urgent: bool = False) -> None:
        """Queue a call. One that is urgent goes before those that are not and have not begun."""

    def watch(self, look: Callable[[], UnderWay]) -> None:
        """Call `look` after each call, and then again and again until nothing is under way. It must not raise. One
        function only, named before anything is submitted."""

    def hook(self) -> None:
        """An engine's hook is at work: for a queue that has no thread, the time to look."""

    def shutdown(self) -> None:
        """Finish the call that runs, and drop the others."""


def _nothing() -> UnderWay:
    return UnderWay.NOTHING


class Inline:
    """Runs a call before `submit` returns, and looks in every hook."""

    def __init__(self) -> None:
        self._look: Callable[[], UnderWay] = _nothing

    def submit(self, act: Callable[..., None], *arguments: Any, urgent: bool = False) -> None:
        _run(act, arguments)

    def watch(self, look: Callable[[], UnderWay]) -> None:
        self._look = look

    def hook(self) -> None:
        self._look()

    def shutdown(self) -> None:
        """Nothing is ever queued."""


class CopyThread:
    """One thread. While a load is under way the process's threads take short turns, or an engine that has nothing else
    to do than to ask for its end would keep the interpreter to itself. Stores get what the engine leaves.

    Whoever submits never waits for it: what both touch, `deque` and `SimpleQueue`, change in one go under the
    interpreter's lock, and a thread that holds a lock of its own may have to wait for that one first.

    Args:
        enter: called by the thread first; makes the device its current one.
    """

    def __init__(self, enter: Callable[[], None]) -> None:
        self._turns = ShortTurns()
        self._look: Callable[[], UnderWay] = _nothing
        self._urgent: deque[_Call] = deque()
        self._others: deque[_Call] = deque()
        self._ending = False
        self._signals: SimpleQueue[None] = SimpleQueue()  # one for each call, and one for the end
        self._thread = Thread(target=self._work, args=(enter,), name="lmcache_mp_safe-copies", daemon=True)
        self._thread.start()

    def submit(self, act: Callable[..., None], *arguments: Any, urgent: bool = False) -> None:
        (self._urgent if urgent else self._others).append((act, arguments))
        if urgent:
            self._turns.want(True)
        self._signals.put(None)

    def watch(self, look: Callable[[], UnderWay]) -> None:
        self._look = look

    def hook(self) -> None:
        """The thread looks by itself."""

    def shutdown(self) -> None:
        self._ending = True
        self._signals.put(None)
        self._thread.join()

    def _work(self, enter: Callable[[], None]) -> None:
        try:
            enter()
        except Exception:  # then each copy fails by itself, and is reported
            logger.exception("the copy thread cannot use its device")
        while True:
            self._wait(self._look())
            if self._ending:
                self._turns.want(False)
                return
            if queue := self._urgent or self._others:
                _run(*queue.popleft())

    def _wait(self, under_way: UnderWay) -> None:
        """Until there is a call, or it is time to look again."""
        self._turns.want(under_way is UnderWay.LOADS or bool(self._urgent))
        if self._urgent:  # submitted meanwhile, and its own wish may have come first
            self._turns.want(True)
        try:
            self._signals.get(timeout=_LOOK_S[under_way])
        except Empty:
            return


def _run(act: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    try:
        act(*arguments)
    except Exception:
        logger.exception("a call on the copy thread failed")
