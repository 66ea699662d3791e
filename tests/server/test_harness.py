"""The server harness: it starts, stops and tells what went wrong, and it only ever touches its own child."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcache_mp_safe.errors import Scope, ServerError
from lmcache_mp_safe.testing.server import LMCacheServer, answers_ping

pytestmark = [pytest.mark.server, pytest.mark.timeout(120)]


def test_a_server_that_cannot_start_is_an_error_with_the_tail_of_its_log(tmp_path: Path) -> None:
    server = LMCacheServer(extra=("--no-such-flag",), log=tmp_path / "server.log")
    with pytest.raises(ServerError, match="no-such-flag") as caught:
        server.start()
    assert caught.value.scope is Scope.SERVER
    assert not server.running


def test_a_server_that_does_not_answer_in_time_is_an_error_and_is_not_left_behind() -> None:
    server = LMCacheServer(start_timeout_s=0.0)
    with pytest.raises(ServerError, match="did not answer within 0 s"):
        server.start()
    assert not server.running


def test_a_stopped_server_leaves_no_segment_and_answers_nothing() -> None:
    with LMCacheServer(l1_size_gb=0.25) as server:
        assert answers_ping(server.url, 2.0)
        assert server.segment_path.exists()
    assert not server.segment_path.exists()
    assert not answers_ping(server.url, 0.2)


def test_there_is_no_process_id_before_the_start() -> None:
    with pytest.raises(ServerError, match="not running"):
        _ = LMCacheServer().pid
