"""What the halves count, in the form in which vLLM carries it to its log and to `/metrics`.

vLLM takes stats from every rank and from the scheduler in each step, adds them up, sends them to the front end as plain
data, and has them observed there. All of it follows from the table in `metrics/series.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from lmcache_mp_safe.metrics.series import PREFIX, SERIES, Kind, Series
from lmcache_mp_safe.metrics.tally import Sample

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class SafeStats(KVConnectorStats):
    """A `Sample` in vLLM's wrapping: `data` is its fields as plain data."""

    @classmethod
    def of(cls, sample: Sample | None) -> SafeStats | None:
        return None if sample is None else cls(data=msgspec.to_builtins(sample))

    @property
    def sample(self) -> Sample:
        return msgspec.convert(self.data, Sample)

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """This one with another rank's, the scheduler's or a later one."""
        self.data = msgspec.to_builtins(self.sample.merged(msgspec.convert(other.data, Sample)))
        return self

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log: what was counted and how long things took on average; what did not happen is left out."""
        sample, words = self.sample, {}
        for series in SERIES:
            for key in series.keys:
                name = " ".join(filter(None, (series.name, series.label_value(key))))
                if observed := sample.times.get(key):
                    words[f"{name} avg ms"] = round(sum(observed) / len(observed) * 1000, 3)
                elif amount := sample.sums.get(key) or sample.levels.get(key):
                    words[name] = round(amount, 3)
        return words

    def is_empty(self) -> bool:
        return not any(self.data.values())


class SafePromMetrics(KVConnectorPromMetrics):
    """The series of the table, one child for each engine and label value, there from the start with 0."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[type, type],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._children: dict[tuple[int, str], Any] = {}
        for series in SERIES:
            metric = self._make(series, metric_types, [*labelnames, *filter(None, (series.label,))])
            for engine, values in per_engine_labelvalues.items():
                for key in series.keys:
                    self._children[engine, key.value] = metric.labels(*values, *_label_values(series, key))

    def _make(self, series: Series, metric_types: Mapping[type, type], labelnames: list[str]) -> Any:
        name, text = PREFIX + series.name, f"{series.help} Unit: {series.unit}."
        if series.kind is Kind.GAUGE:
            return metric_types[Gauge](name, text, labelnames=labelnames, multiprocess_mode="mostrecent")
        if series.kind is Kind.HISTOGRAM:
            return metric_types[Histogram](name, text, labelnames=labelnames, buckets=list(series.buckets))
        return metric_types[Counter](name, text, labelnames=labelnames)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        sample = msgspec.convert(transfer_stats_data, Sample)
        for key, amount in sample.sums.items():
            self._children[engine_idx, key].inc(amount)
        for key, seconds in sample.times.items():
            for observed in seconds:
                self._children[engine_idx, key].observe(observed)
        for key, value in sample.levels.items():
            self._children[engine_idx, key].set(value)


def _label_values(series: Series, key: StrEnum) -> tuple[str, ...]:
    return (series.label_value(key),) if series.label else ()
