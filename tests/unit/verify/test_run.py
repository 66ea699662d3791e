"""The whole of `verify` against a server in this process: traffic, client, judge, page, exit status."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from lmcache_mp_safe.cli.main import app
from lmcache_mp_safe.errors import ConfigError, ServerError
from lmcache_mp_safe.verify.client import Client
from lmcache_mp_safe.verify.judge import Verdict
from lmcache_mp_safe.verify.page import page
from lmcache_mp_safe.verify.report import as_values
from lmcache_mp_safe.verify.run import Result, Settings, run
from lmcache_mp_safe.verify.stub import Fault, Stub
from lmcache_mp_safe.verify.traffic import chats, generated


def ask(subject: Stub, *, requests: int = 12) -> Result:
    async def go() -> Result:
        async with (
            Client("http://subject.invalid/v1", timeout_s=10, transport=subject.transport()) as tested,
            Client("http://baseline.invalid", timeout_s=10, transport=Stub().transport()) as baseline,
        ):
            settings = Settings(requests=requests)
            return await run(tested, baseline, "stub", generated(0), settings, lambda *_: None)

    return asyncio.run(go())


def test_self_test_of_the_command_passes(tmp_path: Path) -> None:
    written = tmp_path / "self-test.json"
    outcome = CliRunner().invoke(app, ["verify", "--self-test", "--json", str(written)])
    assert outcome.exit_code == 0, outcome.output
    assert json.loads(written.read_text())["ok"] is True


def test_self_test_fails_where_a_wrong_answer_is_not_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmcache_mp_safe.verify.checks._distance", lambda *_: 0.0)
    monkeypatch.setattr("lmcache_mp_safe.verify.checks._gap", lambda *_: 0.0)
    assert CliRunner().invoke(app, ["verify", "--self-test"]).exit_code == 1


@pytest.mark.parametrize("faulty", range(0, 24, 5))
def test_wrong_state_in_any_one_answer_is_noticed(faulty: int) -> None:
    result = ask(Stub(Fault.WRONG_STATE, faulty))
    assert result.judgement().verdict is Verdict.CORRUPT
    assert sum("said" in answer for answer in as_values(result)["answers"]) == 1


def test_as_many_prompts_are_asked_as_were_wanted() -> None:
    subject = Stub()
    assert len(ask(subject, requests=7).rows) == 7
    assert subject.asked == 14


def test_server_that_does_not_count_cached_tokens_leaves_the_run_undecided_and_is_told_the_flag() -> None:
    result = ask(Stub(says_cached=False))
    assert result.judgement().verdict is Verdict.UNDECIDED
    assert any("--enable-prompt-tokens-details" in note for note in result.notes)


def test_page_names_nothing_outside_itself_and_escapes_what_was_said() -> None:
    result = ask(Stub(Fault.WRONG_STATE, 3))
    result.model = "<script>alert(1)</script>"
    text = page(result)
    assert "<script" not in text
    assert not [word for word in ("src=", "href=", "@import", "url(") if word in text]
    assert text.count("<svg") == 3
    assert ">corrupt</b>" in text


def test_server_that_fails_is_the_servers_trouble_and_not_a_verdict() -> None:
    async def go() -> None:
        transport = httpx.MockTransport(lambda _: httpx.Response(500, text="out of memory"))
        async with Client("http://subject.invalid", timeout_s=5, transport=transport) as broken:
            await run(broken, broken, "m", generated(0), Settings(requests=3), lambda *_: None)

    with pytest.raises(ServerError, match="status 500: out of memory"):
        asyncio.run(go())


def test_command_without_an_address_or_with_nobody_there_ends_with_2() -> None:
    assert CliRunner().invoke(app, ["verify"]).exit_code == 2
    assert CliRunner().invoke(app, ["verify", "--url", "http://127.0.0.1:9", "--timeout", "2"]).exit_code == 2


def test_traffic_is_the_same_from_the_same_seed_and_shares_its_system_prompt() -> None:
    first, again, other = (next(generated(seed)) for seed in (1, 1, 2))
    assert first == again != other
    sessions = generated(1)
    assert len({request.messages[0] for _ in range(3) for request in next(sessions)}) == 1
    # Turns repeat what came before, until the compaction.
    assert first[1].messages[: len(first[0].messages)] == first[0].messages
    assert first[3].messages[1] != first[0].messages[1]


def test_users_chats_are_asked_turn_by_turn(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    messages = [{"role": role, "content": role} for role in ("system", "user", "assistant", "user")]
    file.write_text(json.dumps({"messages": messages}) + "\n\n" + json.dumps(messages[:2]) + "\n")
    first, second = chats(file)
    assert [len(request.messages) for request in (*first, *second)] == [2, 4, 2]


@pytest.mark.parametrize("line", ["{", "{}", '[{"role": "user"}]', '[{"role": "user", "content": [1]}]', ""])
def test_line_that_is_no_chat_is_an_error_that_shows_the_shape(line: str, tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(line)
    with pytest.raises(ConfigError, match="--chats"):
        chats(file)
