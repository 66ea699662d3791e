"""What vLLM shows of the connector is what happened: counted here a second time, from answers and from the model."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from lmcache_mp_safe.metrics.series import PREFIX, SERIES, Kind
from lmcache_mp_safe.testing.engine import Engine, EngineSpec
from lmcache_mp_safe.testing.engine_worker import EngineProcess
from lmcache_mp_safe.testing.oracle import Tokens, sessions
from lmcache_mp_safe.testing.serve import MODEL_NAME, ServeProcess

pytestmark = pytest.mark.engine

MakeSpec = Callable[..., EngineSpec]
Values = Mapping[str, float]

BLOCK = 640  # of the hybrid model, and its chunk
MAX_TOKENS = 8


def prompts(seed: int, *lengths: int) -> list[Tokens]:
    """Prompts of these lengths; each begins with all of the shorter ones."""
    (session,) = sessions(seed, count=1, turns=1, system_tokens=700, turn_tokens=(max(lengths), max(lengths)))
    return [session.prompt([])[:length] for length in lengths]


def values_of(text: str) -> dict[str, float]:
    """`name{own label value}` -> value of every series of ours in the text of `/metrics`."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(PREFIX) and not sample.name.endswith(("_bucket", "_created")):
                own = [value for name, value in sample.labels.items() if name not in ("engine", "model_name")]
                name = sample.name.removeprefix(PREFIX)
                found[name + (f" {own[0]}" if own else "")] = sample.value
    return found


def values_in_process(engine: Engine) -> dict[str, float]:
    """As `/metrics` of this process would show them."""
    from prometheus_client import REGISTRY, generate_latest

    return values_of(generate_latest(REGISTRY).decode())


def nonzero(shown: Values) -> str:
    return str({name: value for name, value in shown.items() if value})


def page_bytes(engine: Engine) -> tuple[int, int]:
    """Bytes that one rank holds for a block of the attention groups, and of the recurrent ones."""
    attention = state = 0
    for group in engine.groups:
        size = group.page_bytes * len(group.layers)
        attention, state = (attention, state + size) if group.spec == "MambaSpec" else (attention + size, state)
    return attention, state


def expected(prompt_tokens: int, asked: int, ranks: int, attention: int, state: int) -> dict[str, float]:
    """One prompt, computed and stored once, then asked for again with vLLM's cache emptied until it was loaded."""
    blocks = prompt_tokens // BLOCK
    payload = blocks * attention + state  # vLLM keeps a state at the last full block only
    return {
        "lookups_total": asked,
        "hits_total": 1,
        "promised_tokens_total": blocks * BLOCK,
        "loaded_tokens_total": blocks * BLOCK,
        "stored_tokens_total": blocks * BLOCK,
        "objects_stored_total": blocks + 1,
        "stored_bytes_total": ranks * payload,
        "loaded_bytes_total": ranks * payload,
        "promised_bytes_total": ranks * payload,
        "copied_bytes_total store": ranks * payload,
        "copied_bytes_total load": ranks * payload,
        "copies_total done": ranks * (blocks + 2),
        "copy_seconds_count store": ranks * (blocks + 1),
        "copy_seconds_count load": ranks,
        "connections_total": 1,
        "epoch": 1,
        "server_up": 1,
    }


ZERO = ("pinned_blocks", "slots", "jobs", "objects_rejected_total", "internal_errors_total")


def check(shown: Values, wanted: Values, lived_s: float) -> None:
    """`lived_s`: seconds since the engine was started; no call can have taken longer."""
    assert {name: shown[name] for name in wanted} == wanted, nonzero(shown)
    assert {name: value for name, value in shown.items() if name.startswith(ZERO) and value} == {}
    misses = sum(value for name, value in shown.items() if name.startswith("misses_total"))
    assert shown["lookups_total"] == shown["hits_total"] + misses
    for call in ("lookup", "retrieve", "reserve", "commit"):
        calls = shown[f"call_seconds_count {call}"]
        assert calls > 0
        assert 0 < shown[f"call_seconds_sum {call}"] < calls * lived_s


# Not on vLLM 0.27: its offline `LLM` drops the stats of steps without an output. Its server does not.
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_stats_of_all_ranks_add_up_to_what_the_model_and_the_prompt_say(
    make_spec: MakeSpec, salt: str, ranks: int
) -> None:
    spec = make_spec(tensor_parallel_size=ranks, options={"disable_log_stats": False})
    (prompt,) = prompts(21, 1300)
    begun = time.monotonic()
    with EngineProcess(spec) as engine:
        hit, asked = 0, 0
        while not hit and asked < 4:  # on a busy machine a lookup may get no answer in time
            (answer,) = engine.generate([prompt], MAX_TOKENS, salts=[salt])
            hit, asked = answer.external_tokens, asked + 1
            engine.drain()
            engine.reset_prefix_cache()
        assert (hit, asked > 1) == (2 * BLOCK, True), nonzero(engine.run(values_in_process))
        attention, state = engine.run(page_bytes)
        shown = engine.run(values_in_process)
        check(shown, expected(len(prompt), asked, ranks, attention, state), time.monotonic() - begun)


@pytest.mark.old_vllm
def test_events_carry_the_tokens_of_what_was_stored_and_withdraw_what_is_gone(make_spec: MakeSpec, salt: str) -> None:
    (prompt,) = prompts(22, 1300)
    events_config = {"enable_kv_cache_events": True, "publisher": "null"}
    with Engine(make_spec(options={"kv_events_config": events_config})) as engine:
        published: list[Any] = []
        engine.scheduler.kv_event_publisher.publish = lambda batch: published.extend(batch.events)
        engine.generate([prompt], MAX_TOKENS, salts=[salt])
        engine.drain()
        ours = [event for event in published if event.medium == "CPU"]
        attention = [event for event in ours if engine.groups[event.group_idx].spec != "MambaSpec"]
        assert [list(event.token_ids) for event in attention] == [list(prompt[:640]), list(prompt[640:1280])]
        assert [event.parent_block_hash for event in attention] == [None, attention[0].block_hashes[0]]
        assert {event.block_size for event in ours} == {BLOCK}
        assert len(ours) == 3
        assert all(salt in str(event.extra_keys) for event in ours if event.parent_block_hash is None)
        announced = {one for event in ours for one in event.block_hashes}
        published.clear()
        engine.connector.reset_cache()
        engine.generate([prompt[:300]], MAX_TOKENS, salts=[salt])
        removed = [event for event in published if type(event).__name__ == "BlockRemoved" and event.medium == "CPU"]
        assert {one for event in removed for one in event.block_hashes} == announced


@pytest.mark.long
def test_without_events_nothing_is_collected(make_spec: MakeSpec, salt: str) -> None:
    (prompt,) = prompts(23, 1300)
    with Engine(make_spec()) as engine:
        engine.generate([prompt], MAX_TOKENS, salts=[salt])
        engine.drain()
        assert engine.connector.scheduler_half.counters["objects_stored"] == 3
        assert engine.connector.take_events() == []


class Client:
    """What a user of `vllm serve` does."""

    def __init__(self, url: str) -> None:
        self._url = url

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = json.dumps(body or {}).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as response:
            return json.loads(response.read() or b"null")

    def complete(self, prompt: Tokens, salt: str) -> Any:
        body = {
            "model": MODEL_NAME,
            "prompt": list(prompt),
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": salt,
            "kv_transfer_params": {"cached_token_stats": True},
        }
        return self.post("/v1/completions", body)

    def metrics(self) -> str:
        with urllib.request.urlopen(self._url + "/metrics", timeout=30) as response:
            return str(response.read().decode())

    def settled(self, deadline_s: float = 30.0) -> dict[str, float]:
        """The connector's values once nothing is under way and the same comes twice."""
        end = time.monotonic() + deadline_s
        last: dict[str, float] = {}
        while time.monotonic() < end:
            now = values_of(self.metrics())
            if now == last and not any(value for name, value in now.items() if name.startswith(("jobs", "pinned"))):
                return now
            last = now
            time.sleep(0.5)
        raise AssertionError(f"the metrics did not settle: {last}")

    def forget_locally(self) -> None:
        """Empty vLLM's own prefix cache; it refuses while a store holds blocks."""
        self.settled()
        self.post("/reset_prefix_cache")


def vllms_own(text: str, name: str) -> float:
    """Sum of one of vLLM's own counters."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    )


@pytest.mark.old_vllm
def test_metrics_of_a_live_server_match_what_its_answers_say(make_spec: MakeSpec, salt: str) -> None:
    """Conversations as in the demo, twice over; vLLM's cache is emptied before each turn: what is cached was loaded."""
    spec = make_spec()
    begun = time.monotonic()
    with ServeProcess(spec, flags=["--enable-prompt-tokens-details"], dev_mode=True) as vllm:
        client = Client(vllm.url)
        assert set(values_of(client.metrics()).values()) <= {0.0}, "every series is there from the start"
        hits = hit_tokens = requests = 0
        for session in 2 * sessions(seed=24, count=2, turns=2, system_tokens=1400):
            told: list[Tokens] = []
            for _ in session.texts:
                prompt = session.prompt(told)
                answer = client.complete(prompt, salt)
                cached = (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
                stats = answer["kv_transfer_params"]["cached_token_stats"]
                assert stats == {
                    "num_vllm_cached_tokens": 0,
                    "num_lmcache_cached_tokens": cached,
                    "num_lmcache_extra_cached_tokens": cached,
                }
                requests, hits, hit_tokens = requests + 1, hits + bool(cached), hit_tokens + cached
                told.append(prompt[:MAX_TOKENS])  # what an assistant may have said
                client.forget_locally()
        shown, text = client.settled(), client.metrics()
    assert hits >= 4, nonzero(shown)
    check(
        shown,
        {
            "lookups_total": requests,
            "hits_total": hits,
            "promised_tokens_total": hit_tokens,
            "loaded_tokens_total": hit_tokens,
            "copy_seconds_count load": hits,
            "server_up": 1,
        },
        time.monotonic() - begun,
    )
    assert vllms_own(text, "vllm:external_prefix_cache_hits_total") == hit_tokens
    assert shown["copied_bytes_total store"] == shown["stored_bytes_total"]
    assert shown["copied_bytes_total load"] == shown["loaded_bytes_total"]
    assert shown["copies_total done"] == shown["objects_stored_total"] + hits
    for series in SERIES:
        ending = "_count" if series.kind is Kind.HISTOGRAM else ""
        assert series.full_name + ending in text, series.name
