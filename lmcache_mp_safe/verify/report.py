"""What a run found, as values for JSON and as a table for the terminal. The page is `page.py`'s."""

from __future__ import annotations

import dataclasses
import math
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
        "hits": result.hits.answers,
        "external_tokens": result.external_tokens,
        "notes": result.notes,
        "rates": [dataclasses.asdict(rate) for rate in judgement.rates],
        "ttft_s": ttft_medians(result),
        "answers": [_answer_values(row, *answer) for row in result.rows for answer in _answers(row)],
    }


def _answers(row: Row) -> list[tuple[str, Answer, Comparison]]:
    """Each answer to one prompt, with what it was found to be; the baseline's is the measure."""
    return [
        ("baseline", row.baseline, Comparison(Kind.SAME)),
        ("control", row.control, row.control_comparison),
        ("first", row.first, row.first_comparison),
        ("again", row.again, row.again_comparison),
    ]


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
        "distance_nats": _nats(comparison.distance_nats),
        "drift_nats": _nats(comparison.drift_nats),
        "flaws": sorted(comparison.flaws),
    }
    if comparison.kind is Kind.FAR or comparison.flaws:
        values |= {"said": answer.text, "baseline_said": row.baseline.text}
    return values


def _nats(distance: float) -> float | None:
    """None where a server's log-probability was not a number: JSON has no word for it."""
    return round(distance, 4) if math.isfinite(distance) else None


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
    console.print(f"{result.url} against {result.baseline_url}, model {result.model}", markup=False, highlight=False)
    table = Table()
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
        console.print(f"note: {note}", markup=False, highlight=False)
    console.print(f"{judgement.verdict}: {judgement.why}", markup=False)
