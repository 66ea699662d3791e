"""The way of a count through vLLM: from ranks and scheduler, as plain data, to Prometheus."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats

from lmcache_mp_safe.compat.stats import SafePromMetrics, SafeStats
from lmcache_mp_safe.metrics.series import SERIES, Kind
from lmcache_mp_safe.metrics.tally import Sample

pytestmark = pytest.mark.old_vllm

RANK = Sample({"copied:store": 100, "job:done": 1}, {"copy:store": [0.01]})
SCHEDULER = Sample({"lookups": 2, "hits": 1, "miss:absent": 1}, {"call:lookup": [0.002, 0.004]}, {"epoch": 3})
LABELS = ["model_name", "engine"]


def stats(sample: Sample) -> KVConnectorStats:
    wrapped = SafeStats.of(sample)
    assert wrapped is not None
    return wrapped


@pytest.fixture
def metrics() -> Iterator[SafePromMetrics]:
    before = set(REGISTRY._collector_to_names)
    types: dict[type, type] = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    yield SafePromMetrics(config, types, LABELS, {0: ["tiny", "0"], 1: ["tiny", "1"]})
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def value(name: str, engine: str = "0", **labels: str) -> float | None:
    return REGISTRY.get_sample_value(f"vllm:lmcache_mp_safe_{name}", {"model_name": "tiny", "engine": engine, **labels})


def test_two_ranks_and_the_scheduler_add_up_and_survive_the_way_to_the_front_end(metrics: SafePromMetrics) -> None:
    total = stats(RANK).aggregate(stats(RANK)).aggregate(stats(SCHEDULER))
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(total.data))
    for _ in range(2):
        metrics.observe(data, 1)
    assert value("copied_bytes_total", "1", direction="store") == 400
    assert value("copies_total", "1", outcome="done") == 4
    assert value("copy_seconds_count", "1", direction="store") == 4
    assert value("copy_seconds_sum", "1", direction="store") == pytest.approx(0.04)
    assert value("lookups_total", "1") == 4
    assert value("misses_total", "1", reason="absent") == 2
    assert value("call_seconds_count", "1", call="lookup") == 4
    assert value("epoch", "1") == 3
    assert value("lookups_total", "0") == 0, "another engine's"


def test_every_series_is_there_from_the_start(metrics: SafePromMetrics) -> None:
    for series in SERIES:
        name = series.full_name.removeprefix("vllm:lmcache_mp_safe_")
        for key in series.keys:
            labels = {series.label: series.label_value(key)} if series.label else {}
            assert value(name + ("_count" if series.kind is Kind.HISTOGRAM else ""), **labels) == 0, series.name


def test_stats_of_one_step_do_not_change_those_they_were_made_from() -> None:
    first, second = stats(RANK), stats(RANK)
    first.aggregate(second)
    assert second.data == stats(RANK).data


def test_the_log_says_what_happened_and_no_more() -> None:
    assert stats(SCHEDULER).reduce() == {
        "lookups": 2, "hits": 1, "misses absent": 1, "call_seconds lookup avg ms": 3.0, "epoch": 3,
    }  # fmt: skip
    assert SafeStats().is_empty()
    assert SafeStats().reduce() == {}
    assert not stats(RANK).is_empty()
    emptied = stats(RANK)
    emptied.reset()
    assert emptied.is_empty()
    assert SafeStats.of(None) is None
