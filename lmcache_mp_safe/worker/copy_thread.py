"""Where copies are submitted: inline, or on a thread beside the one that runs the model.

Submitting costs the driver more than an engine's hook may take (170 microseconds for a chunk of 112 runs on one H200),
and so do first touches of the server's memory. A hook only queues.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class InlineExecutor(Executor):
    """Runs what is submitted before `submit` returns."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def copy_thread(enter: Callable[[], None]) -> Executor:
    """One thread, which runs what is submitted in order; `enter` makes the device its current one."""
    return ThreadPoolExecutor(1, thread_name_prefix="lmcache_mp_safe-copies", initializer=enter)
