"""A picture of plans: which rank computes which row, and how much work that makes for each. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dbsp_core.planning.plan import Plan
from dbsp_core.reports.style import INK, RANKS, STYLE, WIDTH, heading

_NAMED = 16
"""Most ranks, and heads, of which each is named."""


def owners_picture(title: str, plans: Sequence[tuple[str, Plan]]) -> Any:
    """Draws plans of one mask, one below the other: the owner of each row, and active blocks by rank.

    Args:
        plans: (name, plan) of equal worlds and grids, at least one.

    Returns:
        A matplotlib `Figure`.
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    world = plans[0][1].strategy.world
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 1.0 + 2.2 * len(plans)), layout="constrained")
        FigureCanvasAgg(figure)
        note = f"{title}; right: active blocks by GPU, dotted: the mean (counted)"
        heading(figure, "Who computes what: a plan gives every row an owner", note)
        axes = figure.subplots(len(plans), 2, squeeze=False, width_ratios=(2.2, 1), sharex="col")
        colours = _colours(world)
        for (left, right), (name, plan) in zip(axes, plans, strict=True):
            _owners(left, plan, colours)
            left.set_title(f"{name}: owner of each row", loc="left")
            work = plan.work
            right.barh(range(world), work, height=0.8 if world <= _NAMED else 1.0, color=colours)
            right.axvline(work.mean(), color=INK, linestyle="dotted")
            right.set_title(f"ρ_s {plan.rho:.3f}", loc="left")
            right.set(ylim=(world - 0.5, -0.5))
            right.grid(visible=False)
            _name_each(right, "GPU", world)
        axes[-1][0].set_xlabel("query block")
        axes[-1][1].xaxis.get_major_locator().set_params(nbins=4)
        axes[-1][1].set_xlabel("active blocks")
    return figure


def _colours(world: int) -> list[Any]:
    """Returns one for each rank; of more than are in `RANKS`, from blue to red."""
    if world <= len(RANKS):
        return list(RANKS[:world])
    from matplotlib import colormaps

    return list(colormaps["turbo"](np.linspace(0.05, 0.95, world)))


def _owners(axis: Any, plan: Plan, colours: list[Any]) -> None:
    from matplotlib.colors import BoundaryNorm, ListedColormap

    world = plan.strategy.world
    norm = BoundaryNorm(np.arange(world + 1) - 0.5, world)
    colour_map = ListedColormap(colours)
    owners = plan.owner
    axis.imshow(owners, cmap=colour_map, norm=norm, aspect="auto", interpolation="nearest")
    axis.grid(visible=False)
    axis.set_yticks(np.arange(plan.heads + 1) - 0.5, minor=True)
    axis.grid(which="minor", axis="y", color="white", linewidth=2 if plan.heads <= _NAMED else 0.5)
    axis.tick_params(which="minor", length=0)
    _name_each(axis, "head", plan.heads)


def _name_each(axis: Any, what: str, count: int) -> None:
    """Names each of a few on the y axis, or numbers some of many."""
    if count <= _NAMED:
        axis.set_yticks(range(count), [f"{what} {number}" for number in range(count)])
    else:
        axis.set_ylabel(what)
        axis.yaxis.get_major_locator().set_params(integer=True)
