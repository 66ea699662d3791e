"""Behaviours of LMCache's client, its sockets and its processes, which the fake server does not have.

The fake is called, not sent to: no queue can fill up, no socket connects again, no process is killed.
"""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Any

import pytest

from lmcache_mp_safe.testing.conformance import Flavour
from lmcache_mp_safe.testing.conformance.bench import Bench

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

# Queues calls for one server, then asks whether another one still answers this process.
_CHILD = """
import os, sys, time
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory
stopped, running, calls = sys.argv[1], sys.argv[2], int(sys.argv[3])
one, other = RequestClientFactory.create(stopped), RequestClientFactory.create(running)
assert other.ping(None).wait(60)
for number in range(calls):
    one.query_prefetch_status("x" * 10_000)
time.sleep(1)
print("answers" if other.ping(None).wait(10) else "is silent", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(("calls", "other"), [(200, "answers"), (5000, "is silent")])
def test_a_full_queue_to_a_stopped_server_blocks_every_client_of_the_process(
    real_servers: Any, calls: int, other: str
) -> None:
    stopped, running = (real_servers.subjects[one].server for one in (Flavour.PLAIN, Flavour.SHORT))
    stopped.pause()
    try:
        child = [sys.executable, "-c", _CHILD, stopped.url, running.url, str(calls)]
        done = subprocess.run(child, capture_output=True, text=True, timeout=300, check=True)
    finally:
        stopped.resume()
    assert done.stdout.splitlines()[-1] == other


def test_what_was_queued_for_a_dead_server_is_answered_by_the_next_one(real_servers: Any) -> None:
    subject = real_servers.subjects[Flavour.PLAIN]
    bench = Bench(subject)
    subject.server.kill()
    ping = bench.client.ping(bench.instance)
    assert not ping.wait(1.0)
    subject.server.start()
    assert bench.answer(ping) is True
    subject.close_clients()


def test_the_pool_of_a_killed_server_loses_its_name(real_servers: Any) -> None:
    subject = real_servers.subjects[Flavour.PLAIN]
    path = subject.server.segment_path
    assert path.exists()
    subject.server.kill()
    end = time.monotonic() + 20.0
    while path.exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert not path.exists()
    subject.server.start()
