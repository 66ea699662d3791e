"""Writes the table of series for docs/metrics.md.

python -m lmcache_mp_safe.metrics.document
"""

from __future__ import annotations

from lmcache_mp_safe.metrics.series import SERIES, Series


def table() -> str:
    """A Markdown table: one row for every series."""
    rows = ["| series | kind | unit | counted by | label | meaning |", "|---|---|---|---|---|---|"]
    return "\n".join([*rows, *map(_row, SERIES)])


def _row(series: Series) -> str:
    values = ", ".join(series.label_value(key) for key in series.keys)
    label = f"`{series.label}`: {values}" if series.label else ""
    cells = (f"`{series.full_name}`", series.kind.value, series.unit, series.role.value, label, series.help)
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    import sys

    sys.stdout.write(table() + "\n")
