"""A picture of masks: how dense each head of each layer is, and a few masks. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any, cast

import numpy as np

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.reports.style import STYLE, heading, rank_colour


def spread_out(values: Sequence[int], count: int) -> list[int]:
    """Picks at most `count` values at equal distances, the first and last among them."""
    return [values[i] for i in np.unique(np.linspace(0, len(values) - 1, min(count, len(values))).round().astype(int))]


def heads_to_draw(densities: np.ndarray, count: int = 3) -> list[tuple[int, int]]:
    """Returns (row of `densities`, head) from the emptiest head over the middle one to the densest."""
    order = np.argsort(densities, axis=None, kind="stable").tolist()
    return [divmod(flat, densities.shape[1]) for flat in spread_out(order, count)]


def mask_picture(
    title: str,
    layers: Sequence[int],
    densities: np.ndarray,
    masks: Sequence[tuple[int, int, BlockMask]],
    similarity: Sequence[tuple[str, Sequence[int], Sequence[float]]] = (),
) -> bytes:
    """Draws a PNG: a heat map of heads × layers, some heads' masks, and how masks change over steps where known.

    Args:
        densities: float64[layers, H].
        masks: (layer, head, that layer's mask), at least one.
        similarity: (label, steps, IoU with the step before).
    """
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    below = len(masks) + bool(similarity)
    picture = BytesIO()
    with rc_context({**STYLE, "axes.grid": False}):
        figure = Figure(figsize=(max(9.0, 2.7 * below), 7.4), layout="constrained")
        FigureCanvasAgg(figure)
        heading(
            figure,
            "Which blocks do the masks keep?",
            f"{title}: mean density {densities.mean():.3f}; below, heads from the emptiest to the densest",
        )
        upper, lower = cast(Any, figure.subfigures(2, 1, height_ratios=(1.0, 1.15)))
        _heat_map(upper, layers, densities)
        axes = np.atleast_1d(lower.subplots(1, below))
        for axis, (layer, head, mask) in zip(axes, masks, strict=False):
            _one_mask(axis, layer, head, mask)
        if similarity:
            _drift(axes[-1], similarity)
        figure.savefig(picture, format="png")
    return picture.getvalue()


def _heat_map(figure: Any, layers: Sequence[int], densities: np.ndarray) -> None:
    axis = figure.subplots()
    image = axis.imshow(densities.T, aspect="auto", cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
    shown = spread_out(range(len(layers)), 20)
    axis.set(xlabel="layer", ylabel="head", xticks=shown, xticklabels=[layers[i] for i in shown])
    axis.yaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(image, ax=axis, label="density: share of blocks computed")


def _one_mask(axis: Any, layer: int, head: int, mask: BlockMask) -> None:
    bits, order = mask.square(head).cpu().numpy(), mask.grid.order_of(head)
    names = order if isinstance(order, str) else ", ".join(dict.fromkeys(order))
    axis.imshow(bits, cmap="Greys", vmin=0, vmax=1, interpolation="antialiased")  # of many blocks, local means
    axis.set_title(f"layer {layer}, head {head} ({names})\ndensity {bits.mean():.3f}", fontsize=10)
    axis.set(xlabel="key block", ylabel="query block")


def _drift(axis: Any, similarity: Sequence[tuple[str, Sequence[int], Sequence[float]]]) -> None:
    for number, (label, steps, values) in enumerate(similarity):
        axis.plot(steps, values, "o-", markersize=3.5, color=rank_colour(number), label=label)
    axis.set(xlabel="step", ylabel="IoU with the step before", ylim=(0, 1.03))
    axis.set_title("How masks drift\nfrom step to step", fontsize=10)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.legend(fontsize=9, loc="lower left")
