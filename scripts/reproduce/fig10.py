"""Fig. 10: the authors' attention times of 40 layers and 4 strategies, modelled; choosing a strategy; and split heads.

Their times grow from layer to layer by 8 : 4 : 2 : 1 for U8R1, U4R2, U2R4 and U1R8: one head grows, which a strategy
shares over its ring. Masks of that family, with the density and growth fitted to half of the layers, are planned by
the paper's planner (whole heads, equal numbers) and by ours, which splits heads. `authors` rows: choosing is judged
by their own times. "auto" takes the strategy that the model predicts to be fastest, "oracle" the fastest measured.
"""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from dbsp_core import BlockGrid, BlockMask, SequenceLayout
from dbsp_core.cost.machine import Hardware, load_hardware
from dbsp_core.cost.prediction import AttentionShape
from dbsp_core.models.table import MODEL_SPECS
from dbsp_core.reports.style import INK
from scripts.reproduce.authors.fit import FIRST_LAYER, GROWTH, WAN
from scripts.reproduce.authors.measured import SEED, STRATEGIES, attention_ms, fitted_half
from scripts.reproduce.authors.runs import dense_s
from scripts.reproduce.common import arguments
from scripts.reproduce.lockstep import plan_ring, predict_ring
from scripts.reproduce.modelled import modelled_layer
from scripts.results.colours import STRATEGIES as COLOURS
from scripts.results.figures import legend_below, panels
from scripts.results.result import Result, Row

NAMES = [str(strategy) for strategy in STRATEGIES]
BLOCK = 128
REWARD = 20.0
"""R_b. Rows differ by chance alone, so that none need move: a high R_b keeps them. At R_b = 2 a fifth of them move,
and the ring takes 0.9 ms more than the authors measured."""


def family_mask(layer: int, hardware: Hardware, block: int = BLOCK) -> BlockMask:
    """40 heads of one density, of which one is denser from layer to layer."""
    spec = MODEL_SPECS[WAN]
    head_s = dense_s(WAN, hardware.constants) * 8 / spec.heads
    density = np.full(spec.heads, FIRST_LAYER)
    density[spec.heads // 2] += layer * GROWTH / head_s
    grid = BlockGrid.uniform(spec.tokens, block)
    drawn = np.random.default_rng([SEED, layer]).random((spec.heads, grid.nq, grid.nk), dtype=np.float32)
    return BlockMask(drawn < density[:, None, None], grid)


def measure(layers: int = 40) -> list[Row]:
    """Mean attention times of the first so many layers, and ρ_s of their plans."""
    hardware, spec = load_hardware("a800"), MODEL_SPECS[WAN]
    measured, half = attention_ms().mean(axis=0), fitted_half(40)
    rows = []
    for layer in range(layers):
        mask = family_mask(layer, hardware)
        shape = AttentionShape(1, mask.heads, spec.head_dim)
        for strategy, name, ms in zip(STRATEGIES, NAMES, measured[layer], strict=True):
            layout = SequenceLayout.contiguous(mask.grid.tokens, 8)
            plan = plan_ring(mask, strategy, "paper", layout, REWARD, equal_heads=True)
            modelled_ms = predict_ring(plan, shape, hardware, layout=layout).total_s * 1e3
            ours, predicted = modelled_layer(strategy, "dbsp", mask, spec, hardware)
            rows.append(
                Row(
                    layer=layer,
                    strategy=name,
                    half="fitted" if half[layer] else "held out",
                    heaviest_head=max(head.mean() for head in mask.bits.numpy()),
                    measured_ms=ms,
                    modelled_ms=modelled_ms,
                    error=modelled_ms / ms - 1,
                    rho=plan.rho,
                    ours_ms=predicted.total_s * 1e3,
                    ours_rho=ours.rho,
                    label="measured by the paper's authors; modelled (a800)",
                )
            )
    return rows


def table(rows: list[Row], field: str) -> np.ndarray:
    """float64[layers, strategies]"""
    return np.array([getattr(row, field) for row in rows]).reshape(-1, len(STRATEGIES))


def summary(rows: list[Row]) -> list[str]:
    """Errors; what choosing is worth by their times and by the model; what splitting heads is worth."""
    errors = np.abs([row.error for row in rows if row.half == "held out"])
    layers = rows[-1].layer + 1
    times = attention_ms()[:, :layers]
    modelled, ours = table(rows, "modelled_ms"), table(rows, "ours_ms")
    auto = modelled.argmin(axis=1)
    taken = np.take_along_axis(times, np.broadcast_to(auto[None, :, None], (*times.shape[:2], 1)), axis=2)
    oracle = times.min(axis=2)
    lines = []
    if len(errors):
        lines.append(f"layer times, held out: median error {np.median(errors):.1%}, worst {errors.max():.1%}")
    for what, values in (
        ("authors' times, oracle", times),
        ("modelled, whole heads", modelled),
        ("modelled, ours", ours),
    ):
        fastest = values.min(axis=-1)
        over = [f"{name} {values[..., i].sum() / fastest.sum():.3f}" for i, name in enumerate(NAMES)]
        shares = [f"{name} {(values.argmin(axis=-1) == i).mean():.0%}" for i, name in enumerate(NAMES)]
        lines.append(f"{what}: static over chosen {', '.join(over)}; chosen {', '.join(shares)}")
    lines.append(f"auto by the model, judged by their times: regret {taken.sum() / oracle.sum() - 1:.2%}")
    gain = oracle.mean() / ours.min(axis=1).mean()
    static = min(times[..., i].mean() for i in range(len(NAMES))) / min(ours.mean(axis=0))
    lines.append(
        f"split heads: {ours.min(axis=1).mean():.2f} ms a layer, modelled, where theirs choose best in "
        f"{oracle.mean():.2f}: {gain:.2f} times as fast; best static against best static {static:.2f}"
    )
    return lines


def draw(rows: list[Row]) -> Figure:
    figure, axes = panels(
        "One head grows from layer to layer: which strategy is fastest?",
        "Wan2.1-14B, 8 A800s; dots measured by the authors, lines modelled",
        columns=2,
        height=4.8,
        sharey=True,
    )
    left, right = axes[0]
    measured, modelled, ours = (table(rows, field) for field in ("measured_ms", "modelled_ms", "ours_ms"))
    layers = np.arange(len(measured))
    for i, name in enumerate(NAMES):
        left.plot(layers, measured[:, i], "o", color=COLOURS[name], ms=3.5)
        left.plot(layers, modelled[:, i], "-", color=COLOURS[name], label=name)
        right.plot(layers, ours[:, i], "-", color=COLOURS[name])
    right.plot(
        layers, measured.min(axis=1), "--", color=INK, linewidth=1.2, label="authors' best in each layer, measured"
    )
    left.set(xlabel="layer", ylabel="ms per attention", title="Whole heads: it depends on the layer")
    right.set(xlabel="layer", title="Split heads (planner dbsp): it hardly matters")
    legend_below(figure, (left, right), columns=5)
    return figure


TIMES = Result("fig10", "Attention times by strategy, 8 GPUs", draw)


if __name__ == "__main__":
    TIMES.run(arguments(__doc__, 40), lambda options: measure(options.layers or 40), summary)
