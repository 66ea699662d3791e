"""Writes the Grafana dashboard, dashboards/lmcache-mp-safe.json. Which panels there are is decided here; how a series
is drawn follows from its kind.

python -m lmcache_mp_safe.metrics.dashboard > dashboards/lmcache-mp-safe.json
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lmcache_mp_safe.metrics.series import SERIES, Kind, Series

_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3
_FILTER = '{job=~"$job", engine=~"$engine"}'
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_QUANTILES = (0.5, 0.99)
_BY_NAME = {series.name: series for series in SERIES}


@dataclass(frozen=True)
class Panel:
    """One graph: series of one unit. `unit` is Grafana's name for it."""

    title: str
    unit: str
    names: tuple[str, ...]


ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    (
        "Hits",
        (
            Panel("Lookups and hits a second", "ops", ("lookups", "hits")),
            Panel("Misses a second by reason", "ops", ("misses",)),
            Panel("Tokens a second", "short", ("promised_tokens", "loaded_tokens", "stored_tokens")),
            Panel("Bytes a second", "Bps", ("promised_bytes", "loaded_bytes", "stored_bytes", "copied_bytes")),
            Panel("Late and failed lookups a second", "ops", ("lookups_late", "lookups_failed", "probes")),
            Panel("Failed loads a second", "ops", ("loads_failed", "loads_refused")),
        ),
    ),
    (
        "Integrity",
        (
            Panel("Objects not believed, a second", "ops", ("objects_rejected",)),
            Panel("Objects mended a second", "ops", ("repairs_started", "objects_mended")),
            Panel("Internal errors a second", "ops", ("internal_errors",)),
        ),
    ),
    (
        "Stores and copies",
        (
            Panel("Objects a second", "ops", ("objects_stored", "evicted_chunks_seen")),
            Panel("Why something was not stored", "ops", ("store_setbacks",)),
            Panel("Jobs of ranks a second by outcome", "ops", ("copies",)),
            Panel("Copy time", "s", ("copy_seconds",)),
            Panel("Jobs and slots", "short", ("jobs", "slots")),
            Panel("Pinned blocks", "short", ("pinned_blocks",)),
        ),
    ),
    (
        "Server",
        (
            Panel("Call time", "s", ("call_seconds",)),
            Panel("Failed calls a second by reason", "ops", ("calls_failed",)),
            Panel("Unanswered calls", "short", ("calls_unanswered",)),
            Panel("Server up, epoch", "short", ("server_up", "epoch")),
            Panel("Connections made and lost a second, resets", "ops", ("connections", "connections_lost", "resets")),
            Panel("Share of time bypassed", "percentunit", ("bypass_seconds",)),
        ),
    ),
)


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    return {
        "title": "lmcache_mp_safe",
        "uid": "lmcache-mp-safe",
        "schemaVersion": 39,
        "tags": ["vllm", "lmcache"],
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "30s",
        "templating": {"list": [_datasource(), _variable("job"), _variable("engine")]},
        "panels": list(_panels()),
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}


def _variable(label: str) -> dict[str, Any]:
    query = f"label_values({_BY_NAME['lookups'].full_name}, {label})"
    common = {"type": "query", "datasource": _SOURCE, "refresh": 2, "multi": True, "includeAll": True, "allValue": ".*"}
    return {"name": label, "query": query, "definition": query, **common}


def _panels() -> Iterator[dict[str, Any]]:
    y, number = 0, 1
    for title, panels in ROWS:
        yield {"id": number, "type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}, "panels": []}
        y, number = y + 1, number + 1
        for index, panel in enumerate(panels):
            line, column = divmod(index, _COLUMNS)
            place = {"x": column * _WIDTH, "y": y + line * _HEIGHT, "w": _WIDTH, "h": _HEIGHT}
            yield _panel(panel, number, place)
            number += 1
        y += -(-len(panels) // _COLUMNS) * _HEIGHT


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    queries = [query for name in panel.names for query in _queries(_BY_NAME[name])]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": "\n\n".join(f"{name}: {_BY_NAME[name].help}" for name in panel.names),
        "gridPos": place,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend, "datasource": _SOURCE}
            for index, (expression, legend) in enumerate(queries)
        ],
    }


def _queries(series: Series) -> Iterator[tuple[str, str]]:
    """(expression, legend) of what is drawn of a series."""
    name, label = series.full_name, series.label
    legend = f"{series.name} {{{{{label}}}}}" if label else series.name
    if series.kind is Kind.HISTOGRAM:
        for quantile in _QUANTILES:
            rate = f"sum by (le, {label}) (rate({name}_bucket{_FILTER}[$__rate_interval]))"
            yield f"histogram_quantile({quantile}, {rate})", f"{{{{{label}}}}} p{quantile * 100:g}"
        return
    inner = f"{name}{_FILTER}" if series.kind is Kind.GAUGE else f"rate({name}{_FILTER}[$__rate_interval])"
    yield f"sum by ({label or 'engine'}) ({inner})", legend


if __name__ == "__main__":
    import sys

    sys.stdout.write(json.dumps(dashboard(), indent=1) + "\n")
