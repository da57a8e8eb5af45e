"""Parts that figures of results have in common: panels, bars in groups, lines, legends below, and names in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")  # no display needed

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dbsp_core.reports.style import INK, STYLE, WIDTH, heading

matplotlib.rcParams.update(STYLE)

STAR: dict[str, Any] = {"marker": "*", "color": INK, "markersize": 14, "linestyle": "none"}
STAR |= {"markeredgecolor": "white", "markeredgewidth": 0.8}
"""How a value that a paper publishes is drawn."""
_MODELS = {"wan2.1-t2v-14b": "Wan2.1-14B", "cogvideox1.5-5b": "CogVideoX1.5-5B"}


def panels(
    title: str, note: str, rows: int = 1, columns: int = 1, height: float = 4.4, **options: Any
) -> tuple[Figure, np.ndarray]:
    """A figure under its heading, and its axes, [rows, columns]. height: inches; options: of `Figure.subplots`"""
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, **options)
    heading(figure, title, note)
    return figure, axes


def in_words(preset: str) -> str:
    """A model as its makers write it; masks fitted under SpargeAttn are said to be so."""
    name = preset.removesuffix("-sparge")
    return _MODELS.get(name, name) + (", SpargeAttn" if name != preset else "")


def grouped_bars(
    axes: Axes,
    groups: Sequence[str],
    series: Mapping[str, Sequence[float]],
    colours: Mapping[str, str] | Sequence[str],
    *,
    base: float = 0.0,
    errors: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Bars next to one another in each group, from `base` on; NaN leaves one out. errors: half lengths, by label"""
    width = 0.82 / len(series)
    for index, (label, values) in enumerate(series.items()):
        at = np.arange(len(groups)) + (index - (len(series) - 1) / 2) * width
        colour = colours[label] if isinstance(colours, Mapping) else colours[index]
        heights = np.asarray(values, dtype=np.float64) - base
        axes.bar(at, heights, width * 0.92, bottom=base, color=colour, label=label)
        if errors:
            axes.errorbar(at, heights + base, errors[label], fmt="none", ecolor=INK, elinewidth=1, capsize=2)
    axes.set_xticks(range(len(groups)), groups)
    axes.grid(axis="x", visible=False)
    axes.tick_params(axis="x", length=0)


def imbalance_axis(axes: Axes, most: float | None = None) -> None:
    """The vertical axis of ρ_s, which begins where a plan is balanced."""
    axes.set(ylabel="imbalance ρ_s (1: even)", ylim=(1, most))


def legend_below(figure: Figure, axes: Axes | Iterable[Axes], columns: int = 4, **options: Any) -> None:
    """One legend under all panels, where it covers nothing; each label once, in the order in which axes have them."""
    handles: dict[str, Any] = {}
    for panel in [axes] if isinstance(axes, Axes) else axes:
        for handle, label in zip(*panel.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(list(handles.values()), list(handles), ncols=columns, loc="outside lower center", **options)
