"""The HTML page: one file, no script, nothing from elsewhere, light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from lmcache_mp_safe.verify.checks import Kind
from lmcache_mp_safe.verify.report import ttft_medians
from lmcache_mp_safe.verify.run import Result

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP, _RIGHT = 860, 260, 80, 40, 14, 40
_SHOWN = 20

# (x, y, class, title)
Point = tuple[float, float, str, str]

_STYLE = """
:root { color-scheme: light dark; --ink: #1d232a; --soft: #5d6873; --paper: #fff; --line: #d5dade; --ok:
#2166ac; --tie: #b8860b;
  --bad: #c0182b; --plain: #7a8794; --fill: #f3f5f7 }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ec; --soft: #9ba6b1; --paper: #14181c; --line:
#333b43; --ok: #6baed6;
  --tie: #e0b040; --bad: #ff6b6b; --plain: #8894a0; --fill: #1d2329 } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
max-width: 54rem;
  padding: 0 1rem }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.15rem; margin: 2rem 0 .4rem }
p, li { max-width: 46rem } .soft, figcaption { color: var(--soft) }
.verdict { border-left: .4rem solid var(--soft); background: var(--fill); padding: .6rem 1rem; margin: 1rem 0 }
.verdict b { font-size: 1.25rem } .clean { border-color: var(--ok) } .corrupt { border-color: var(--bad) }
.suspicious, .undecided { border-color: var(--tie) }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top }
td.n, th.n { text-align: right } td.t { overflow-wrap: anywhere }
figure { margin: 1rem 0 } svg { width: 100%; height: auto } svg text { fill: var(--soft); font-size: 13px }
.axis { stroke: var(--line) } .same, .hit { fill: var(--ok) } .near-tie { fill: var(--tie) } .far { fill: var(--bad) }
.miss { fill: var(--plain) } circle { fill-opacity: .75 }
"""

_READING = """
<p>Every prompt was asked four times, greedily: twice of the baseline, recomputed and then with its own prefix cache
(the <b>control</b>; recomputed too where the server under test is its own baseline), and twice of the server under test
(<b>first</b> fills the cache, <b>again</b> finds it).</p>
<ul>
<li><b>Same</b>: the same tokens as the baseline. <b>Near-tie</b>: another token, but one that the baseline
held for as good as its own. Rounding does that, and it is no fault unless it is more frequent, or log-probabilities
are more than ten times as far off, than in a control with hits. <b>Far</b>: a token that it would hardly have said, or
log-probabilities that are not its own. A wrong cache entry does that.</li>
<li>A far divergence where the control has none is corruption. Where the control has some too, and for flaws
of the text, the
rates are compared: p is the chance of so many if both sides were alike (Fisher's exact test, one-sided).</li>
</ul>
"""


def page(result: Result) -> str:
    """The whole document."""
    judgement = result.judgement()
    verdict = judgement.verdict.value
    about = (
        f"{escape(result.url)} against {escape(result.baseline_url)}, model {escape(result.model)}: "
        f"{len(result.rows)} prompts, {result.settings.concurrency} sessions at a time, "
        f"{result.settings.max_tokens} tokens at most, near-tie up to {result.settings.near_tie_nats:g} nats, "
        f"{result.seconds:.0f} s"
    )
    notes = "".join(f"<li>{escape(note)}</li>" for note in result.notes)
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>verify: {verdict}</title><style>{_STYLE}</style></head><body>",
            f'<h1>lmcache-mp-safe verify</h1><p class="soft">{about}</p>',
            f'<div class="verdict {verdict}"><b>{verdict}</b><br>{escape(judgement.why)}</div>',
            f"<ul>{notes}</ul>" if notes else "",
            "<h2>What was seen</h2>",
            _rates(result),
            "<h2>Divergence over time</h2>",
            _plot(
                _divergences(result),
                "seconds since the start",
                "distance, nats",
                "red: far; yellow: near-tie; blue: same",
            ),
            "<h2>Tokens from the cache</h2>",
            _plot(_cached(result), "prompt tokens", "cached tokens", "blue: with a hit; grey: without"),
            "<h2>Time to the first token</h2>",
            _plot(_times(result), "prompt tokens", "seconds", "blue: with a hit; grey: without, and the baseline's"),
            _medians(result),
            "<h2>Answers that leave the baseline far, or are flawed</h2>",
            _wrong(result),
            "<h2>How to read it</h2>",
            _READING,
            "</body></html>",
        ]
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: bool) -> str:
    kind = ' class="n"' if numbers else ' class="t"'
    top = "".join(f"<th{kind if index else ''}>{escape(cell)}</th>" for index, cell in enumerate(head))
    body = "".join(
        "<tr>" + "".join(f"<td{kind if index else ''}>{escape(cell)}</td>" for index, cell in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{top}</tr>{body}</table>"


def _rates(result: Result) -> str:
    rows = [
        (rate.what, f"{rate.tested} of {rate.of_tested}", f"{rate.control} of {rate.of_control}", f"{rate.p:.2g}")
        for rate in result.judgement().rates
    ]
    return _table(("seen in", "tested answers", "control answers", "p"), rows, numbers=True)


def _medians(result: Result) -> str:
    rows = [(name.replace("_", " "), "-" if s is None else f"{s:.3g}") for name, s in ttft_medians(result).items()]
    return _table(("median", "seconds"), rows, numbers=True)


def _wrong(result: Result) -> str:
    wrong = [
        (row.request.name, ", ".join([comparison.kind, *sorted(comparison.flaws)]), row.baseline.text, answer.text)
        for row, answer, comparison in result.tested()
        if comparison.kind is Kind.FAR or comparison.flaws
    ]
    if not wrong:
        return "<p>None.</p>"
    left = f'<p class="soft">{len(wrong) - _SHOWN} more are in the JSON.</p>' if len(wrong) > _SHOWN else ""
    return _table(("request", "what", "the baseline said", "it said"), wrong[:_SHOWN], numbers=False) + left


def _divergences(result: Result) -> list[Point]:
    return [
        (answer.at_s, max(found.distance_nats, found.drift_nats), found.kind.value, row.request.name)
        for row, answer, found in result.tested()
    ]


def _cached(result: Result) -> list[Point]:
    return [
        (answer.prompt_tokens, answer.cached_tokens, "hit" if answer.cached_tokens else "miss", row.request.name)
        for row, answer, _ in result.tested()
        if answer.cached_tokens is not None
    ]


def _times(result: Result) -> list[Point]:
    tested = [(row, answer) for row, answer, _ in result.tested()] + [(row, row.baseline) for row in result.rows]
    return [
        (answer.prompt_tokens, answer.ttft_s, "hit" if answer.cached_tokens else "miss", row.request.name)
        for row, answer in tested
    ]


def _ceiling(value: float) -> float:
    """Where an axis ends that has to reach `value`: round, and so are its quarters."""
    if value <= 0:
        return 1.0
    power = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in (1, 2, 4, 8, 10) if step * power >= value)


def _plot(points: Sequence[Point], across: str, up: str, caption: str) -> str:
    """A scatter plot from the origin."""
    if not points:
        return "<p>Not measured: see the notes.</p>"
    finite = [y for _, y, _, _ in points if y != float("inf")]
    right, top = _ceiling(max(x for x, *_ in points)), _ceiling(max(finite, default=0.0))
    plot_width, plot_height = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _BOTTOM - _TOP

    def place(x: float, y: float) -> tuple[float, float]:
        return _LEFT + plot_width * x / right, _TOP + plot_height * (1 - min(y, top) / top)

    marks = []
    for x, y, kind, title in points:
        cx, cy = place(x, y)
        marks.append(
            f'<circle class="{kind}" cx="{cx:.1f}" cy="{cy:.1f}" r="4"><title>{escape(title)}</title></circle>'
        )
    lines = []
    for step in range(5):
        x, y = place(right * step / 4, top * step / 4)
        lines.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        lines.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{top * step / 4:.7g}</text>')
        lines.append(f'<text x="{x:.1f}" y="{_HEIGHT - 22}" text-anchor="middle">{right * step / 4:.7g}</text>')
    lines.append(f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 4}" text-anchor="middle">{across}</text>')
    middle = _TOP + plot_height / 2
    lines.append(f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{up}</text>')
    drawn = f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">{"".join(lines)}{"".join(marks)}</svg>'
    return f"<figure>{drawn}<figcaption>{caption}</figcaption></figure>"
