"""The picture of a run: dense blocks of ranks under contiguous plans and under db-SP's. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO

import numpy as np

from dbsp_core.planning.plan import Plan

__all__ = ["balance_picture"]


def balance_picture(records: Mapping[int, Plan]) -> bytes:
    """PNG: by layer, the dense blocks of each rank before (contiguous) and after, with ρ_s above."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    layers = sorted(records)
    figure = Figure(figsize=(max(7.0, 1.5 + 0.9 * len(layers)), 6.0), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 1, sharex=True, sharey=True)
    rows = (
        (axes[0], "before: contiguous", [records[i].metrics.compared[1] for i in layers]),
        (axes[1], f"after: {records[layers[0]].planner}", [records[i].metrics.work for i in layers]),
    )
    for axis, title, work in rows:
        totals = np.array([periods.sum(axis=0) for periods in work])
        ranks = totals.shape[1]
        width = 0.8 / ranks
        for rank in range(ranks):
            place = np.arange(len(layers)) + (rank - (ranks - 1) / 2) * width
            axis.bar(place, totals[:, rank], width * 0.92, label=f"rank {rank}", color=f"C{rank % 10}")
        middle = np.arange(len(layers))
        axis.hlines(totals.mean(axis=1), middle - 0.45, middle + 0.45, "black", "dotted")
        for index, layer in enumerate(layers):
            plan = records[layer]
            rho = plan.rho_before if axis is axes[0] else plan.rho
            axis.annotate(
                f"ρ_s {rho:.3f}", (index, totals[index].max()), (0, 4), textcoords="offset points", ha="center", size=8
            )
        axis.set(title=title, ylabel="dense blocks")
        axis.margins(y=0.18)
    axes[1].set(xlabel="layer", xticks=np.arange(len(layers)), xticklabels=layers)
    axes[0].legend(ncols=min(8, ranks), fontsize=8, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.12))
    picture = BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    return picture.getvalue()
