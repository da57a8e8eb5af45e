"""Does attention grow sparser over training (DSV, Fig. 7 and 8)? The small model, trained again in fewer steps.

Only the transformer is trained, from its random beginning, on the shipped autoencoder's latents; at some steps its
weights are kept. Each of them, and the shipped model, then sees the same clips that none was trained on, with the same
noise. Stopped, it goes on from its last checkpoint when it is started again.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.progress import Progress
from safetensors.torch import load_file, load_model, save_model

from dbsp_core.config.config import DbspConfig
from dbsp_core.reports.style import INK, layer_colour
from scripts.results.figures import STAR, legend_below, panels
from scripts.results.result import FOLDER, Result
from scripts.training.__main__ import CAPTION, Recipe
from scripts.training.flow import Phase, Videos, make_transformer, train_transformer
from scripts.training.trained_model.attention_measures import Spread, spread
from scripts.training.trained_model.prediction import Kept
from scripts.training.trained_model.small_model import MEASURED_HERE, load_pipeline
from scripts.training.video.clips import Clips, encode_clips
from scripts.training.video.settings import SYNTHETIC, Settings
from tests.support.single_process import attach_single_process

PHASES = (Phase(150, 16, 1), Phase(50, 6, 3), Phase(600, 2, 9))  # a quarter of the shipped model's
KEPT = (0, 25, 75, 150, 200, 350, 450, 550, 650, 800)
LEVELS = (0.25, 0.6, 0.9)  # of the noise, at which attention is measured, one clip each
UNSEEN = 1000  # added to the seed of the training clips
MEASURED = "measured while the small model was trained"


@dataclass(frozen=True)
class Checkpoint:
    """Means over noise levels and every eighth query, of one layer; see `Spread`.

    model: "run", or "shipped", whose step is that of its own training

    least, most: density of the layer's sparsest and densest head;  loss: velocity's mean squared error on these clips
    """

    model: str
    step: int
    layer: int
    density: float
    least: float
    most: float
    top_1: float
    top_10: float
    top_30: float
    concentrated: float
    power: float
    exponential: float
    lognormal: float
    loss: float
    label: str = MEASURED


def training_videos(folder: Path) -> Videos:
    """The clips of a folder as `train_transformer` takes them."""
    contents = [load_file(file) for file in sorted(folder.glob("[0-9]*.safetensors"))]

    def padded(text: torch.Tensor) -> torch.Tensor:
        return F.pad(text, (0, 0, 0, CAPTION - len(text)))

    no_text = load_file(folder / "no-caption.safetensors")["text"]
    latents = torch.stack([content["latents"] for content in contents])
    return Videos(latents, torch.stack([padded(content["text"]) for content in contents]), padded(no_text))


def beginning(seed: int) -> Any:
    torch.manual_seed(seed)
    recipe = Recipe()
    return make_transformer(recipe.head_width, recipe.layers)


def train(seed: int, folder: Path, work: Path) -> None:
    """Writes WORK/step-N.safetensors for each of KEPT."""
    transformer = beginning(seed)

    def keep(done: int) -> None:
        if done in KEPT:
            save_model(transformer, str(work / f"step-{done:03d}.safetensors"))

    keep(0)
    with Progress() as progress:
        videos = training_videos(folder)
        train_transformer(transformer, videos, list(PHASES), Recipe().rate, seed, work, progress, keep)


@torch.no_grad()
def attention(transformer: Any, clips: Clips) -> Iterator[tuple[int, list[Spread], float]]:
    """Of each noise level and layer, its heads; and the level's loss."""
    for number, level in enumerate(LEVELS):
        item, kept = clips.item(number), Kept((0,))
        attached = attach_single_process(transformer, DbspConfig(mask=kept))
        mixed = torch.lerp(item.latents, item.noise, level)[None]
        try:
            velocity = transformer(mixed, torch.tensor([1000 * level]), item.text[None], return_dict=False)[0]
        finally:
            attached.detach()
        loss = float(F.mse_loss(velocity[0], item.noise - item.latents))
        for (_, layer), (q, k, scale) in sorted(kept.tensors.items()):
            yield layer, [spread(*head, scale) for head in zip(q[:, ::8], k, strict=True)], loss


def measure(model: str, step: int, transformer: Any, clips: Clips) -> list[Checkpoint]:
    seen: dict[int, list[list[Spread]]] = {}
    losses: dict[int, list[float]] = {}
    for layer, heads, loss in attention(transformer.eval(), clips):
        seen.setdefault(layer, []).append(heads)
        losses.setdefault(layer, []).append(loss)
    rows = []
    for layer, levels in seen.items():
        densities = np.mean([[head.density for head in heads] for heads in levels], 0)
        every = [asdict(head) for heads in levels for head in heads]
        means = {
            name: float(np.mean([one[name] for one in every]))
            for name in Checkpoint.__dataclass_fields__
            if name in every[0]
        }
        extremes = {"least": float(densities.min()), "most": float(densities.max())}
        label = MEASURED if model == "run" else MEASURED_HERE
        loss = float(np.mean(losses[layer]))
        rows.append(Checkpoint(model, step, layer, **means, **extremes, loss=loss, label=label))
    return rows


def draw(rows: list[Checkpoint]) -> Figure:
    figure, axes = panels(
        "Does attention grow sparser while a model is trained?",
        f"DSV's Figs. 7 and 8, asked of the small model; {MEASURED}\n"
        "Shaded: from a layer's sparsest to its densest head; ★ the shipped model, after 3,200 steps",
        columns=3,
        height=4.8,
    )
    density, first_keys, losses = axes[0]
    run, shipped = ([row for row in rows if row.model == name] for name in ("run", "shipped"))
    last = max(row.step for row in run)
    for layer in sorted({row.layer for row in run}):
        here = [row for row in run if row.layer == layer]
        steps, colour = [row.step for row in here], layer_colour(layer)
        density.fill_between(
            steps, [row.least for row in here], [row.most for row in here], color=colour, alpha=0.12, linewidth=0
        )
        for axis, field in ((density, "density"), (first_keys, "top_10")):
            axis.plot(steps, [getattr(row, field) for row in here], "o-", ms=4, color=colour, label=f"layer {layer}")
            for one in (row for row in shipped if row.layer == layer):
                axis.plot(last * 1.12, getattr(one, field), **{**STAR, "color": colour})
    first = [row for row in run if row.layer == 0]
    losses.plot([row.step for row in first], [row.loss for row in first], "o-", ms=4, color=INK)
    losses.plot(last * 1.12, shipped[0].loss, **STAR)
    density.set(title="Keys that hold 90 %\nof attention, share", ylim=(0, 1))
    first_keys.set(title="Attention that 10 %\nof keys hold", ylim=(0, 1))
    losses.set(title="Loss on clips\nnot trained on", ylim=(0, None))
    for axis in axes[0]:
        axis.set_xlabel("training step")
    legend_below(figure, density)
    return figure


TRAINING = Result("dsv-training", "Sparsity over training (DSV, Fig. 7, 8)", Checkpoint, draw)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--clips", type=int, default=200, help="to train on, drawn")
    parser.add_argument("--seed", type=int, default=3, help="of clips, weights and noise; 1000 more for unseen clips")
    parser.add_argument(
        "--work", type=Path, default=Path("out/over-training"), help="folder for clips and checkpoints"
    )
    parser.add_argument("--as-it-is", action="store_true", help="measure what is trained so far, and train no further")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the CSV and the PNG")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")

    def encoded(count: int, seed: int) -> Path:
        return encode_clips(
            Settings.parse(
                ["--data", f"{SYNTHETIC}:{count}", "--seed", str(seed), "--out", str(options.work)],
            )
        )

    if not options.as_it_is:
        train(options.seed, encoded(options.clips, options.seed), options.work)
    unseen = encoded(len(LEVELS), options.seed + UNSEEN)
    clips = Clips.read(unseen, no_caption=0.0, seed=options.seed + UNSEEN, shift=3.0)
    rows = []
    for step in KEPT:
        weights = options.work / f"step-{step:03d}.safetensors"
        if options.as_it_is and not weights.is_file():
            break
        transformer = beginning(options.seed)
        load_model(transformer, weights)
        rows += measure("run", step, transformer, clips)
    rows += measure("shipped", 3200, load_pipeline().transformer, clips)
    TRAINING.publish(rows, options.out)


if __name__ == "__main__":
    main()
