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
from lmcache_mp_safe.verify.judge import Hits, Verdict
from lmcache_mp_safe.verify.page import page
from lmcache_mp_safe.verify.report import as_values
from lmcache_mp_safe.verify.run import Result, Settings, Target, run, targets
from lmcache_mp_safe.verify.stub import Fault, Stub
from lmcache_mp_safe.verify.traffic import chats, generated

WORDS = 200  # short prompts: the stub's model hashes them for each token


def ask(subject: Stub, *, requests: int = 12) -> Result:
    async def go() -> Result:
        async with (
            Client("http://subject.invalid/v1", timeout_s=10, transport=subject.transport()) as tested,
            Client("http://baseline.invalid", timeout_s=10, transport=Stub().transport()) as baseline,
        ):
            settings = Settings(requests=requests)
            return await run(
                Target(tested, "stub"), Target(baseline, "stub"), generated(0, WORDS), settings, lambda *_: None
            )

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


def test_server_that_does_not_count_cached_tokens_is_told_the_flag_and_judged_by_its_metrics() -> None:
    result = ask(Stub(says_cached=False))
    assert result.judgement().verdict is Verdict.CLEAN
    assert any("--enable-prompt-tokens-details" in note for note in result.notes)


def test_server_that_counts_no_hits_in_any_way_leaves_the_run_undecided() -> None:
    assert ask(Stub(says_cached=False, has_metrics=False)).judgement().verdict is Verdict.UNDECIDED


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
            target = Target(broken, "m")
            await run(target, target, generated(0), Settings(requests=3), lambda *_: None)

    with pytest.raises(ServerError, match="status 500: out of memory"):
        asyncio.run(go())


def _answering(path: str, response: httpx.Response) -> httpx.MockTransport:
    """A stub that answers one path otherwise."""
    whole = Stub()
    return httpx.MockTransport(lambda asked: response if asked.url.path == path else whole._handle(asked))


@pytest.mark.parametrize(
    ("path", "response", "words"),
    [
        ("/v1/models", httpx.Response(401, text="no key"), "OPENAI_API_KEY"),
        ("/v1/models", httpx.Response(404, text="not here"), "status 404: not here"),
        ("/v1/models", httpx.Response(200, json={"data": []}), "serves no model"),
        ("/v1/models", httpx.Response(200, text="<html>"), "no OpenAI-compatible answer"),
        ("/v1/chat/completions", httpx.Response(400, text="too long"), "session 0, turn 0: status 400: too long"),
        ("/v1/chat/completions", httpx.Response(200, text='data: {"error": "died"}\n\n'), "died"),
        ("/v1/chat/completions", httpx.Response(200, text="data: [DONE]\n\n"), "without log-probabilities"),
        ("/reset_prefix_cache", httpx.Response(500, text="oh"), "POST /reset_prefix_cache: status 500: oh"),
    ],
)
def test_trouble_of_a_server_is_told_in_its_own_words_or_with_what_to_do(
    path: str, response: httpx.Response, words: str
) -> None:
    async def go() -> None:
        async with Client("http://odd.invalid", timeout_s=5, transport=_answering(path, response)) as odd:
            subject, baseline = await targets(odd, odd, None, None)
            await run(subject, baseline, generated(0, WORDS), Settings(requests=3), lambda *_: None)

    with pytest.raises(ServerError, match=f"^http://odd.invalid: .*{words}"):
        asyncio.run(go())


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (httpx.ConnectError("refused"), "nobody can be reached there"),
        (httpx.ReadTimeout("slow"), "within 5 s.*--timeout"),
        (httpx.RemoteProtocolError("closed"), "did the server end"),
    ],
)
def test_connection_that_fails_is_told_with_what_to_look_at(error: httpx.HTTPError, words: str) -> None:
    def fail(_: httpx.Request) -> httpx.Response:
        raise error

    async def go() -> None:
        async with Client("http://odd.invalid", timeout_s=5, transport=httpx.MockTransport(fail)) as odd:
            await odd.models()

    with pytest.raises(ServerError, match=words):
        asyncio.run(go())


@pytest.mark.parametrize(
    ("model", "baseline_model", "words"),
    [
        ("other", None, "http://subject.invalid does not serve 'other' but: stub. .*--model"),
        (None, "other", "http://baseline.invalid does not serve 'other' but: stub. .*--baseline-model"),
    ],
)
def test_model_that_a_server_does_not_serve_is_a_wrong_name_that_says_what_it_serves(
    model: str | None, baseline_model: str | None, words: str
) -> None:
    async def go() -> None:
        async with (
            Client("http://subject.invalid", timeout_s=5, transport=Stub().transport()) as subject,
            Client("http://baseline.invalid", timeout_s=5, transport=Stub().transport()) as baseline,
        ):
            await targets(subject, baseline, model, baseline_model)

    with pytest.raises(ConfigError, match=words):
        asyncio.run(go())


def test_log_probability_that_is_not_a_number_is_far_and_no_trouble_of_the_server() -> None:
    """vLLM writes null for it, and a broken state makes such."""
    result = ask(Stub(Fault.NOT_A_NUMBER, 3))
    assert result.judgement().verdict is Verdict.CORRUPT
    assert json.dumps(as_values(result), allow_nan=False)
    assert page(result).count("<circle") == page(ask(Stub())).count("<circle")


def test_hits_of_vllms_own_cache_alone_decide_nothing() -> None:
    result = ask(Stub(external_share=0.0))
    assert result.hits == Hits(result.hits.answers, 0)
    assert result.judgement().verdict is Verdict.UNDECIDED
    assert any("--words" in note for note in result.notes)


def test_server_without_metrics_is_judged_with_a_note_that_hits_may_be_local() -> None:
    result = ask(Stub(has_metrics=False))
    assert result.judgement().verdict is Verdict.CLEAN
    assert any("/metrics" in note for note in result.notes)


def test_server_that_ends_after_some_rounds_leaves_what_was_measured() -> None:
    result = ask(Stub(ends_after=50), requests=30)  # the first round are twenty prompts, asked twice
    assert len(result.rows) == 20
    assert "connection broke" in result.ended_early
    assert any("Ended early" in note for note in result.notes)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--url is missing"),
        (["--url", "http://127.0.0.1:9"], "http://127.0.0.1:9: GET /v1/models: nobody can be reached there"),
        (["--url", "localhost:8000"], "nobody can be reached there"),
        (["--url", "http://[::1"], "is no address"),
        (["--url", "http://127.0.0.1:9", "--chats", "/nowhere"], "--chats /nowhere"),
    ],
)
def test_command_that_cannot_ask_says_why_and_ends_with_2(arguments: list[str], words: str) -> None:
    outcome = CliRunner().invoke(app, ["verify", *arguments, "--timeout", "2"])
    assert outcome.exit_code == 2
    assert words in " ".join(outcome.output.split())


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
