"""What a run found, as values for JSON and as a table for the terminal. The page is `page.py`'s."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

from lmcache_mp_safe.verify.checks import Answer, Comparison, Kind
from lmcache_mp_safe.verify.run import Result, Row


def as_values(result: Result) -> dict[str, Any]:
    """Everything that was measured, in plain values; texts only of answers that leave the baseline far."""
    judgement = result.judgement()
    return {
        "verdict": judgement.verdict.value,
        "why": judgement.why,
        "url": result.url,
        "baseline_url": result.baseline_url,
        "model": result.model,
        "settings": dataclasses.asdict(result.settings),
        "seconds": round(result.seconds, 1),
        "prompts": len(result.rows),
        "hits": result.hits,
        "notes": result.notes,
        "rates": [dataclasses.asdict(rate) for rate in judgement.rates],
        "ttft_s": ttft_medians(result),
        "answers": [_answer_values(row, name, *pair) for row in result.rows for name, pair in _answers(row)],
    }


def _answers(row: Row) -> list[tuple[str, tuple[Answer, Comparison]]]:
    return [("first", (row.first, row.first_comparison)), ("again", (row.again, row.again_comparison))]


def _answer_values(row: Row, name: str, answer: Answer, comparison: Comparison) -> dict[str, Any]:
    values: dict[str, Any] = {
        "request": row.request.name,
        "pass": name,
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "ttft_s": round(answer.ttft_s, 4),
        "at_s": round(answer.at_s, 2),
        "kind": comparison.kind.value,
        "position": comparison.position,
        "distance_nats": round(comparison.distance_nats, 4),
        "drift_nats": round(comparison.drift_nats, 4),
        "flaws": sorted(comparison.flaws),
    }
    if comparison.kind is Kind.FAR or comparison.flaws:
        values |= {"said": answer.text, "baseline_said": row.baseline.text}
    return values


def ttft_medians(result: Result) -> dict[str, float | None]:
    """Median seconds to the first token: recomputed, and of the server under test with a hit and without."""
    tested = [answer for _, answer, _ in result.tested()]
    sides = {
        "baseline": [row.baseline.ttft_s for row in result.rows],
        "with_hit": [answer.ttft_s for answer in tested if answer.cached_tokens],
        "without_hit": [answer.ttft_s for answer in tested if answer.cached_tokens == 0],
    }
    return {name: round(statistics.median(times), 4) if times else None for name, times in sides.items()}


def show(console: Console, result: Result) -> None:
    """The verdict, the rates and the times."""
    judgement = result.judgement()
    table = Table(title=f"{result.url} against {result.baseline_url}, model {result.model}")
    table.add_column("seen in")
    for column in ("tested answers", "control answers", "p"):
        table.add_column(column, justify="right")
    for rate in judgement.rates:
        counts = f"{rate.tested} of {rate.of_tested}", f"{rate.control} of {rate.of_control}"
        table.add_row(rate.what, *counts, f"{rate.p:.2g}")
    console.print(table)
    times = ", ".join(
        f"{name.replace('_', ' ')} {'-' if s is None else f'{s:.3g}'}" for name, s in ttft_medians(result).items()
    )
    console.print(f"median time to first token, s: {times}", markup=False)
    for note in result.notes:
        console.print(note, markup=False)
    console.print(f"{judgement.verdict}: {judgement.why}", markup=False)
