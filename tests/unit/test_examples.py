"""The examples run: the script against stand-ins for what it starts, the client against a small web server."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

STAND_IN = """#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
case "$(basename "$0")" in
lmcache) exec sleep 60 ;;
lmcache-mp-safe) exit "$DOCTOR" ;;
esac
"""


def run_serve(folder: Path, doctor: int) -> tuple[int, list[str]]:
    """Run the script where every program only notes how it was called; `doctor` is the status of that one."""
    for program in ("lmcache", "lmcache-mp-safe", "vllm", "curl"):
        (folder / program).write_text(STAND_IN)
        (folder / program).chmod(0o755)
    calls = folder / "calls"
    environment = {
        **os.environ,
        "PATH": f"{folder}:{os.environ['PATH']}",
        "CALLS": str(calls),
        "DOCTOR": str(doctor),
        "PORT": "7000",
        "POOL_GB": "3",
    }
    bash = shutil.which("bash")
    assert bash is not None
    run = subprocess.run(
        [bash, str(EXAMPLES / "serve.sh"), "MODEL", "--mamba-cache-mode", "align"],
        env=environment,
        capture_output=True,
        timeout=60,
        check=False,
    )
    return run.returncode, calls.read_text().splitlines()


def test_script_asks_doctor_with_the_arguments_that_it_serves_with(tmp_path: Path) -> None:
    status, calls = run_serve(tmp_path, doctor=0)
    assert status == 0
    by_program = {call.partition(" ")[0]: call.partition(" ")[2] for call in calls}
    assert "--port 7000" in by_program["lmcache"]
    assert "--l1-size-gb 3 " in by_program["lmcache"]
    served = by_program["vllm"].removeprefix("serve ")
    assert served.startswith("MODEL --mamba-cache-mode align")
    assert json.loads(served.partition("--kv-transfer-config ")[2])["kv_connector_extra_config"] == {
        "lmcache.mp.port": 7000
    }
    assert by_program["lmcache-mp-safe"].endswith(f"-- {served}")


def test_script_serves_nothing_where_doctor_finds_a_problem(tmp_path: Path) -> None:
    status, calls = run_serve(tmp_path, doctor=1)
    assert status == 1
    assert not [call for call in calls if call.startswith("vllm")]


class StandInServer(BaseHTTPRequestHandler):
    """Answers as vLLM does; the second prompt is cached."""

    prompts = 0

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "m"
        cached = 640 * StandInServer.prompts
        StandInServer.prompts += 1
        self._answer({"usage": {"prompt_tokens": 700, "prompt_tokens_details": {"cached_tokens": cached}}})

    def _answer(self, body: object) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    StandInServer.prompts = 0
    with HTTPServer(("127.0.0.1", 0), StandInServer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_client_prints_how_much_of_each_prompt_was_cached(url: str) -> None:
    run = subprocess.run(
        [sys.executable, str(EXAMPLES / "client.py"), "--url", url],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    first, second = run.stdout.splitlines()
    assert first.endswith("700 prompt tokens, 0 cached")
    assert second.endswith("700 prompt tokens, 640 cached")
