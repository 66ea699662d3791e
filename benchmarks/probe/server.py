"""The LMCache server of one probe, and a thread that stops it again and again: a stand-in for a busy host."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from benchmarks.probe.options import Options
from lmcache_mp_safe.testing.server import LMCacheServer

_START_S = 180.0  # many start at once


def make_server(options: Options) -> LMCacheServer | None:
    if options.connector == "none":
        return None
    common = {"l1_size_gb": options.l1_gb, "extra": options.server_arg, "start_timeout_s": _START_S, "log": options.log}
    if options.connector == "safe":  # it lends its memory and needs no GPU: it sees none
        return LMCacheServer(shm_name=options.shm_name or None, environment={"CUDA_VISIBLE_DEVICES": ""}, **common)
    chunk = str(options.block_size * options.chunk_blocks)
    flags = ("--supported-transfer-mode", "lmcache_driven", "--separate-object-groups", "--chunk-size", chunk)
    return LMCacheServer(shm_name="", flags=flags, **common)


class Stall:
    """Stops the server within a `with`.

    Args:
        words: "PERIOD:MS" stops it for MS milliseconds after each PERIOD; anything without a colon never does.
    """

    def __init__(self, server: LMCacheServer | None, words: str) -> None:
        self._server = server
        self._times = [float(part) / 1e3 for part in words.split(":")] if ":" in words else []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.count = 0

    def __enter__(self) -> Self:
        if self._times and self._server is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        period, length = self._times
        assert self._server is not None
        while not self._ended.wait(period):
            self._server.pause()
            try:
                self._ended.wait(length)
            finally:
                self._server.resume()
            self.count += 1
