"""Bars of two columns of a result beside each other, as a small SVG."""

from __future__ import annotations

from pathlib import Path

from lmcache_mp_safe.bench.runner import Result


def plot_pairs(result: Result, ours: str, stock: str, path: Path) -> None:
    """Bars of the columns `ours` and `stock` of every row that has both, on a logarithmic axis.

    Raises:
        ImportError: matplotlib is not installed.
    """
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "lmcache_mp_safe"  # the same result gives the same file
    from matplotlib import pyplot

    rows = [row for row in result.rows if row.values.get(ours) and row.values.get(stock)]
    figure, axes = pyplot.subplots(figsize=(7, 0.8 + 0.32 * len(rows)), layout="constrained")
    for offset, column, name in ((-0.2, ours, "this connector"), (0.2, stock, "stock")):
        widths = [float(row.values[column] or 0) for row in rows]
        axes.barh([i + offset for i in range(len(rows))], widths, 0.38, label=name)
    axes.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel(ours)
    axes.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
