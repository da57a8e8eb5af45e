"""How all figures look: fonts, sizes and colours, one for each planner, strategy, mask source and rank everywhere.

Matplotlib is not needed to import this: `STYLE` is what its `rc_context` takes. Colours of planners are those of the
report's page (`pages/style.css`).
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "INK",
    "MASKS",
    "PLANNERS",
    "RANKS",
    "ROLES",
    "SOFT",
    "STRATEGIES",
    "STYLE",
    "WAITING",
    "WIDTH",
    "heading",
    "rank_colour",
]

WIDTH = 9.0
"""Inches; with `figure.dpi` below 1,260 pixels, of which half are still legible."""
INK, SOFT, GRID = "#1d2330", "#5d6678", "#e3e0da"

PLANNERS = {
    "dbsp": "#2a6db0",
    "contiguous": "#a39a8c",
    "paper": "#e07b35",
    "snake": "#d9b64a",
    "burst": "#a5486e",
}
STRATEGIES = {"U8R1": "#482677", "U4R2": "#277f8e", "U2R4": "#45b36b", "U1R8": "#b5a516"}
"""From Ulysses alone to a ring alone."""
MASKS = {
    "dense": "#5d6678",
    "sparge": "#b3335c",
    "sparge topk": "#e58a9f",
    "window": "#8a9a2b",
    "large window": "#c3cc70",
    "radial": "#1b7f5c",
    "sol": "#6a4fb5",
    "vsa, no gate": "#2f9e9e",
    "window + sparge": "#5f7d3a",
    "lowrank": "#3f8fc4",
    "lowrank, mean query": "#a3cbe6",
}
"""By mask source, where methods are compared by what they keep."""
RANKS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee9944", "#88aa77")
ROLES = {"measured": "#3d4454", "fitted": "#9fc5c3", "held out": "#17807e"}
"""Of what others measured, and of what is modelled: with constants that were fitted to it, and without."""
WAITING = "#e4e1db"

STYLE: dict[str, Any] = {
    "figure.dpi": 140,
    "savefig.dpi": 140,
    "figure.facecolor": "white",  # pages are dark for some readers: figures bring their own ground
    "savefig.facecolor": "white",
    "figure.constrained_layout.use": True,
    "font.family": "DejaVu Sans",  # comes with matplotlib, so that figures are alike on every machine
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
    """Colours of more than eight ranks come again."""
    return RANKS[rank % len(RANKS)]


def heading(figure: Any, title: str, note: str = "") -> None:
    """Writes what a figure asks or found over it, and below in small what its numbers are; room is made for both.

    Args:
        figure: Matplotlib's, with a constrained layout.
        title: One line, or lines that are broken by hand; so is `note`.
    """
    height = figure.get_figheight()
    lines = title.count("\n") + 1
    top = 0.1 + 0.26 * lines
    strip = top + 0.06 + (0.19 * (note.count("\n") + 1) if note else 0.0)
    left = 0.1 / figure.get_figwidth()
    figure.text(left, 1 - 0.1 / height, title, va="top", ha="left", size=14, weight="bold")
    if note:
        figure.text(left, 1 - top / height, note, va="top", ha="left", size=10, color=SOFT)
    figure.get_layout_engine().set(rect=(0, 0, 1, 1 - strip / height))
