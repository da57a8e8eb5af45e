"""The picture of a run: dense blocks of ranks under contiguous plans and under db-SP's. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO

import numpy as np

from dbsp_core.planning.plan import Plan
from dbsp_core.reports.style import INK, STYLE, heading, rank_colour

__all__ = ["balance_picture"]


def balance_picture(records: Mapping[int, Plan]) -> bytes:
    """PNG: by layer, the dense blocks of each rank before (contiguous) and after, with ρ_s above."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layers = sorted(records)
    plans = [records[layer] for layer in layers]
    before, after = (float(np.mean(rho)) for rho in zip(*((plan.rho_before, plan.rho) for plan in plans), strict=True))
    picture = BytesIO()
    with rc_context(STYLE):
        figure = Figure(figsize=(max(9.0, 1.5 + 0.95 * len(layers)), 6.4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots(2, 1, sharex=True, sharey=True)
        heading(
            figure,
            f"How even is the work? Imbalance ρ_s {before:.3f} → {after:.3f}",
            f"Dense blocks by rank at each layer's last attention, {plans[0].strategy}; dotted: perfectly even",
        )
        rows = (
            (axes[0], "before: plain sequence parallelism", [plan.metrics.compared[1] for plan in plans]),
            (axes[1], f"after: planner {plans[0].planner}", [plan.metrics.work for plan in plans]),
        )
        for axis, title, work in rows:
            totals = np.array(work)
            ranks = totals.shape[1]
            width = 0.8 / ranks
            for rank in range(ranks):
                place = np.arange(len(layers)) + (rank - (ranks - 1) / 2) * width
                axis.bar(place, totals[:, rank], width * 0.92, label=f"rank {rank}", color=rank_colour(rank))
            middle = np.arange(len(layers))
            axis.hlines(totals.mean(axis=1), middle - 0.45, middle + 0.45, INK, "dotted")
            for index, plan in enumerate(plans):
                rho = plan.rho_before if axis is axes[0] else plan.rho
                at = (index, totals[index].max())
                axis.annotate(f"ρ_s {rho:.3f}", at, (0, 7), textcoords="offset points", ha="center", size=9.5)
            axis.set(ylabel="dense blocks")
            axis.set_title(title, loc="left")
            axis.margins(y=0.18)
            axis.grid(axis="x", visible=False)
        axes[1].set(xlabel="layer", xticks=np.arange(len(layers)), xticklabels=layers)
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, ncols=min(8, len(labels)), loc="outside lower center")
        figure.savefig(picture, format="png")
    return picture.getvalue()
