"""Style of all figures: fonts, sizes and colors.

This module does not import matplotlib; pass `STYLE` to `matplotlib.rc_context`.
"""

from __future__ import annotations

from typing import Any

WIDTH = 9.0  # inches: 1,260 pixels at `figure.dpi`, legible at half the size
INK, SOFT, GRID = "#1d2330", "#5d6678", "#e3e0da"

RANKS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee9944", "#88aa77")
STYLE: dict[str, Any] = {
    "figure.dpi": 140,
    "savefig.dpi": 140,
    "figure.facecolor": "white",  # some readers' pages are dark, so figures need a background
    "savefig.facecolor": "white",
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",  # part of matplotlib: figures are the same on every machine
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": SOFT,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.labelsize": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 10.5,
    "ytick.labelsize": 10.5,
    "legend.fontsize": 10,
    "legend.frameon": False,
    "lines.linewidth": 2.0,
    "lines.markersize": 6,
    "hatch.color": "#a8a196",
    "hatch.linewidth": 0.9,
}


def rank_colour(rank: int) -> str:
    """Returns a rank's color; colors repeat after eight ranks."""
    return RANKS[rank % len(RANKS)]


def heading(figure: Any, title: str, note: str = "") -> None:
    """Adds a title and a smaller note above a figure with a constrained layout, and makes room for both."""
    height = figure.get_figheight()
    lines = title.count("\n") + 1
    top = 0.1 + 0.26 * lines
    strip = top + 0.06 + (0.19 * (note.count("\n") + 1) if note else 0.0)
    left = 0.1 / figure.get_figwidth()
    figure.text(left, 1 - 0.1 / height, title, va="top", ha="left", size=14, weight="bold")
    if note:
        figure.text(left, 1 - top / height, note, va="top", ha="left", size=10, color=SOFT)
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - strip / height))
