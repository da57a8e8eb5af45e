"""DSV's observations 1, 2 and 5 (Tan et al., 2025, §3) on the small trained model: is each of them so here?

Queries and keys of one video, dense attention, every layer, head and denoising step of the pass with the caption. What
each figure would be by chance stands beside it: keys drawn evenly, and any two queries instead of neighbouring ones.
For observation 4, over training, see over_training.py.
"""

from __future__ import annotations

import argparse
import textwrap
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dbsp_core.reports.style import INK, MASKS
from scripts.results.figures import STAR, grouped_bars, panels
from scripts.results.result import FOLDER, Result, write_csv
from scripts.training.trained_model.attention_measures import SHARES, Observed, near, observe
from scripts.training.trained_model.prediction import STEPS, Kept, run_model
from scripts.training.trained_model.small_model import MEASURED_HERE, PROMPTS, load_pipeline

THW = (9, 9, 15)
DSV_THW = (16, 16, 16)  # the latents that DSV observed (§3)
COUNTED = "counted"


@dataclass(frozen=True)
class Head(Observed):
    """One head at one denoising step."""

    step: int = 0
    layer: int = 0
    head: int = 0
    label: str = MEASURED_HERE


@dataclass(frozen=True)
class Claim:
    """One figure over all heads, layers and steps. least, most: of the layers' means; chance: what it is by chance, or
    for a fit the better of the other two curves"""

    observation: int
    what: str
    value: float
    least: float
    most: float
    chance: float
    label: str = MEASURED_HERE


def heads_of(seed: int) -> list[Head]:
    kept = Kept(tuple(range(STEPS)))
    run_model(load_pipeline(), kept, PROMPTS[0], seed)
    return [
        Head(**asdict(one), step=step, layer=layer, head=head)
        for (step, layer), tokens in sorted(kept.tensors.items())
        for head, one in enumerate(observe(*tokens, THW))
    ]


def claims(heads: list[Head]) -> list[Claim]:
    """What the observations say, over all heads, beside chance; and what chance would be in DSV's grid."""

    def mean(name: str, layer: int | None = None) -> float:
        return float(np.mean([getattr(head, name) for head in heads if layer in (None, head.layer)]))

    def claim(observation: int, what: str, name: str, chance: float) -> Claim:
        layers = [mean(name, layer) for layer in {head.layer for head in heads}]
        return Claim(observation, what, mean(name), min(layers), max(layers), chance)

    rows = [claim(1, "critical keys, share of all", "density", 0.9)]
    rows += [
        claim(1, f"attention of the first {share:.0%} of keys", f"top_{round(100 * share)}", share) for share in SHARES
    ]
    rows.append(claim(1, "queries whose first 10% of keys hold 90%", "concentrated", 0.0))
    for prefix, of in (("", "all keys"), ("tail_", "the first 10%")):
        fits = {name: mean(prefix + name) for name in ("power", "exponential", "lognormal")}
        rows += [
            claim(1, f"R² of {name}, {of}", prefix + name, max(other for key, other in fits.items() if key != name))
            for name in fits
        ]
    chance = {name: float(place.double().mean()) for name, place in near(THW).items()}
    density = {"": mean("density"), "best_": 0.1}
    for prefix, of in (("", "critical keys"), ("best_", "best 10%")):
        rows += [claim(2, f"{of}: {PLACES[name]}", prefix + name, chance[name]) for name in PLACES]
        rows += [claim(5, f"{of}: shared with {OTHERS[name]}", prefix + name, mean(f"{prefix}any")) for name in OTHERS]
        rows.append(claim(5, f"{of}: shared with any other query", f"{prefix}any", density[prefix]))
    for name, place in near(DSV_THW).items():
        value = float(place.double().mean())
        rows.append(Claim(2, f"all keys of 16×16×16: {PLACES[name]}", value, value, value, value, COUNTED))
    return rows


PLACES = {
    "order": "at most 5 away in order",
    "radius": "at most 5 away in space",
    "around": "in the 3×3×3 around",
    "far": "more than 10 away in space",
}
OTHERS = {"next": "the next query", "cube": "its cube of 2×2×2", "group": "its group of 2×4×4"}


def draw(rows: list[Claim]) -> Figure:
    figure, axes = panels(
        "Are DSV's observations so in the small model?",
        f"{MEASURED_HERE}; ★ DSV's own, published; hatched and dotted: by chance",
        2,
        2,
        height=8.6,
    )
    found = {row.what: row for row in rows}
    held = [found[f"attention of the first {share:.0%} of keys"] for share in SHARES]
    at, few = [100 * share for share in SHARES], axes[0, 0]
    few.fill_between(at, [row.least for row in held], [row.most for row in held], color=ALL_KEYS, alpha=0.3)
    few.plot(at, [row.value for row in held], "o-", color=ALL_KEYS, label="mean (shaded: from layer to layer)")
    few.plot(10, 0.9, **STAR, label="DSV: 9 in 10 queries reach this")
    few.plot([0, 30], [0, 0.3], ":", color=INK, linewidth=1.2, label="all keys alike")
    few.set(xlabel="first keys of each query, %", ylabel="attention that they hold", ylim=(0, 1.0))
    few.set_title("1: few keys hold much, fewer than DSV's")
    _fits(axes[0, 1], rows)
    _bars(axes[1, 0], rows, 2, list(PLACES.values()), {1: 0.151, 3: 0.485})
    axes[1, 0].set(ylabel="share of a query's keys", title="2: they are nearer than chance")
    _bars(axes[1, 1], rows, 5, [f"shared with {other}" for other in OTHERS.values()], {1: 0.801})
    axes[1, 1].set(ylabel="share of a query's keys", title="5: neighbours share keys", ylim=(0, 1))
    for axis in axes.flat:
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), fontsize=9.5)
    return figure


def _fits(axes: Axes, rows: list[Claim]) -> None:
    found = {row.what: row.value for row in rows}
    names = {"power": "power law", "exponential": "exponential", "lognormal": "log-normal"}
    series = {
        words: [found[f"R² of {name}, {of}"] for of in ("all keys", "the first 10%")] for name, words in names.items()
    }
    grouped_bars(axes, ["all keys", "the first 10 %"], series, ["#3d4454", "#c9b27a", "#6db5b1"], number="%.2f")
    axes.set(ylabel="R² of log scores over rank", ylim=(0, 1.1))
    axes.set_title("1: it is no power law over all keys")


def _bars(axes: Axes, rows: list[Claim], observation: int, ends: list[str], theirs: dict[int, float]) -> None:
    """Two groups of bars for each end of a name: measured and, hatched, what they are compared with."""
    for kind, (of, colour) in enumerate((("critical keys", ALL_KEYS), ("best 10%", BEST_KEYS))):
        here = [
            next(row for row in rows if row.observation == observation and row.what == f"{of}: {end}") for end in ends
        ]
        at = np.arange(len(ends)) + 0.42 * (kind - 0.5)
        name = "critical keys (90 % of attention)" if kind == 0 else "best 10 % of keys"
        axes.bar(at - 0.1, [row.value for row in here], 0.2, color=colour, label=name)
        axes.bar(at + 0.1, [row.chance for row in here], 0.2, color=colour, alpha=0.4, hatch="///")
    axes.plot(list(theirs), list(theirs.values()), **STAR)
    theirs_by_chance = {row.what.split(": ")[1]: row.chance for row in rows if row.label == COUNTED}
    for place, end in enumerate(ends):
        if end in theirs_by_chance:
            label = "by chance in DSV's 16×16×16" if place == 0 else None
            axes.plot([place - 0.45, place + 0.45], [theirs_by_chance[end]] * 2, ":", color=INK, label=label)
    axes.set_xticks(range(len(ends)), [textwrap.fill(end, 12) for end in ends], fontsize=9.5)
    axes.grid(axis="x", visible=False)


ALL_KEYS, BEST_KEYS = MASKS["dense"], MASKS["lowrank"]
"""Colours of keys that hold 90 % of attention, and of the first tenth."""
OBSERVATIONS = Result("dsv-observations", "DSV's observations 1, 2 and 5", Claim, draw)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the video")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the CSVs and the PNG")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with torch.no_grad():
        heads = heads_of(options.seed)
    write_csv("dsv-heads", heads, options.out)
    rows = claims(heads)
    OBSERVATIONS.publish(rows, options.out)


if __name__ == "__main__":
    main()
