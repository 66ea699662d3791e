"""The Markdown tables of a matrix, from the JSONs of its cells."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_Cell = Mapping[str, Any]


def markdown(folder: Path, header: Mapping[str, str]) -> str:
    cells = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    lines = ["# probes", "", *(f"* {name}: {value}" for name, value in header.items()), ""]
    lines += ["## Cells", "", *_table(_CELL_TITLES, [_cell_row(name, cell) for name, cell in cells.items()])]
    lines += ["## One at a time", "", _SEQUENTIAL_WORDS, ""]
    lines += _table(_SEQUENTIAL_TITLES, [_sequential_row(name, cell) for name, cell in cells.items()])
    for title, words, phases in _ENTRY_SECTIONS:
        rows = [_entry_row(f"{n}, {p}", f) for n, c in cells.items() for p, f in c["phases"].items() if phases(p)]
        lines += [f"## {title}", "", words, "", *_table(_ENTRY_TITLES, rows)]
    lines += ["## Decoded chunks", "", _DECODE_WORDS, ""]
    decoded = [(name, cell["phases"]["decode"]) for name, cell in cells.items() if "decode" in cell["phases"]]
    lines += _table(_DECODE_TITLES, [_decode_row(name, found) for name, found in decoded])
    lines += ["## Problems", ""]
    lines += [f"* {name}: {problem}" for name, cell in cells.items() for problem in cell["problems"]] or ["None."]
    return "\n".join(lines) + "\n"


def _table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    if not rows:
        return ["Not run.", ""]
    return [_line(titles), _line(["---"] * len(titles)), *map(_line, rows), ""]


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(str(cell).replace('|', '/') for cell in cells)} |"


# --- cells ------------------------------------------------------------------------------------------------------------

_CELL_TITLES = ("", "good", "seconds", "batched tokens", "blocks", "async scheduling", "graphs", "copies by", "left")


def _cell_row(name: str, cell: _Cell) -> Sequence[object]:
    engine = cell["engine"]
    return (
        name,
        "yes" if cell["ok"] else "NO",
        cell["seconds"],
        engine.get("batched_tokens", ""),
        engine.get("gpu_blocks", ""),
        _yes(engine.get("async_scheduling")) + (", overlapping steps" if engine.get("steps_overlap") else ""),
        _yes(not engine.get("eager", True)),
        engine.get("copies by", ""),
        ", ".join(f"{what} {int(value)}" for what, value in cell["left"].items()),
    )


def _yes(value: object) -> str:
    return "yes" if value else "no"


# --- one at a time ----------------------------------------------------------------------------------------------------

_SEQUENTIAL_WORDS = (
    "Bit-equal: all tokens and all log-probabilities are the recomputed ones. A prompt holds earlier answers, which"
    " vLLM's own cache keeps as decoding made them, so its hits may differ from a recomputation by rounding. External"
    " against local: hits of the same depth."
)
_SEQUENTIAL_TITLES = (
    "",
    "recomputed again: bit-equal",
    "local hits: bit-equal",
    "external hits: bit-equal",
    "other tokens",
    "external against local: bit-equal",
    "all at once without hits: other tokens",
)


def _sequential_row(name: str, cell: _Cell) -> Sequence[object]:
    phases = cell["phases"]
    again, local = _part(phases, "ref", "again"), _part(phases, "apc", "against_ref")
    external, against_local = _part(phases, "ext", "against_ref"), _part(phases, "ext", "against_apc")
    return (
        name,
        _of(again, "bit_equal", "requests"),
        _of(local, "bit_equal", "requests", f" ({local.get('local_hits')} hits)"),
        _of(external, "bit_equal_hits", "hits"),
        external.get("diverged_hits", ""),
        _of(against_local, "bit_equal", "requests"),
        _of(_part(phases, "control", "against_ref"), "diverged", "requests"),
    )


def _part(phases: _Cell, phase: str, part: str) -> _Cell:
    found: _Cell = phases.get(phase, {}).get(part, {})
    return found


def _of(part: _Cell, count: str, total: str, more: str = "") -> str:
    return f"{part[count]} of {part[total]}{more}" if part else ""


# --- entries ----------------------------------------------------------------------------------------------------------

_ENTRY_SECTIONS = (
    (
        "All at once",
        "Conversations of all sessions at once; then every boundary, alone, with the prompt cut just behind it.",
        lambda phase: phase.startswith("multi"),
    ),
    (
        "Races",
        "Long prompts at once in a small pool, the server stopped for MS after each PERIOD ms; then every boundary."
        " Given up: blocks that vLLM had given up while a store still held them (this package keeps them: pins; of"
        " those, reused: their turn to be handed out had come), or that vLLM handed out (stock: they were reused).",
        lambda phase: phase.startswith("race"),
    ),
)
_ENTRY_TITLES = (
    "",
    "stops",
    "given up / reused while stored",
    "entries: hits (shorter)",
    "as recomputed",
    "as stored alone",
    "unmatched",
    "wrong (other token)",
    "largest gap",
    "jobs",
    "preemptions",
    "page audits: stored, in slots, loaded, wrong",
)


def _entry_row(name: str, found: _Cell) -> Sequence[object]:
    entries, counts = found["entries"], found.get("race_counts", found["counts"])
    reused = counts.get("reuses_prevented", counts.get("reused_while_stored", 0))
    jobs = {key.removeprefix("job "): value for key, value in found["counts"].items() if key.startswith("job ")}
    return (
        name,
        found["stalls"],
        f"{counts.get('given_up_while_stored', '-')} / {reused}",
        f"{entries['hits']} of {entries['boundaries']} ({entries['short_hits']})",
        entries["equal"],
        entries["as_alone"],
        entries["unmatched"],
        f"{entries['wrong']} ({entries['other_tokens']})",
        f"{entries['largest_gap']:.4f}",
        ", ".join(f"{value} {outcome}" for outcome, value in jobs.items()) or f"{counts.get('stores', 0)} stores",
        counts.get("preemptions", 0),
        _audit_words(found),
    )


def _audit_words(found: _Cell) -> str:
    seen = found.get("audit")
    return f"{seen['stored']}, {seen['in_slots']}, {seen['loaded']}, {seen['wrong']}" if seen else ""


# --- decoded chunks ---------------------------------------------------------------------------------------------------

_DECODE_WORDS = (
    "Long answers of all sessions at once, asked again as prompts: first a local hit, then an external one. Bit-equal:"
    " where both have the same depth, so that the local hit, too, is on what decoding made."
)
_DECODE_TITLES = (
    "",
    "external hits that reach into the answer",
    "external against local: bit-equal",
    "at the first token",
    "largest gap",
    "page audits: stored, in slots, loaded, wrong",
)


def _decode_row(name: str, found: _Cell) -> Sequence[object]:
    against = found["against_local"]
    hits = f"{found['hits_on_decoded']} of {found['sessions']}"
    equal, first = _of(against, "bit_equal", "requests"), _of(against, "first_equal", "requests")
    return name, hits, equal, first, f"{against['largest_gap']:.4f}", _audit_words(found)
