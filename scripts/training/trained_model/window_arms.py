"""Window masks beside predicted ones in training (DSV, Fig. 15), asked small: the trained model, tuned four ways.

Every arm starts from the shipped weights and sees the same clips with the same noise in the same order: dense
attention; SpargeAttn's predicted masks; a window of about their density, in the place of DSV's WA-M; and one of three
times that, the density of DSV's WA-L, two thirds of each axis. Each is judged under the attention that it was trained
with, on clips that none of them saw. Stopped, it goes on from its last checkpoint when it is started again.
"""

from __future__ import annotations

import argparse
import copy
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.progress import Progress

from dbsp_core.config.config import DbspConfig
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.reports.style import MASKS
from scripts.results.figures import panels
from scripts.results.result import FOLDER, Result
from scripts.training.loop import train
from scripts.training.plain import plain_attention
from scripts.training.trained_model.small_model import (
    MEASURED_HERE,
    PROMPTS,
    Video,
    Watched,
    generate,
    load_pipeline,
    psnr,
    ssim,
)
from scripts.training.video.clips import Clips, encode_clips
from scripts.training.video.fine_tuning import flow_loss
from scripts.training.video.settings import SYNTHETIC, Settings
from tests.support import single_process
from tests.support.single_process import attach_single_process, token_mask

VALIDATION = 12  # clips that no arm was trained on, each at one noise level
UNSEEN = 1000  # added to the seed of the training clips
BATCH, STEPS = 2, 6  # clips in a step; denoising steps of a video
ARMS: dict[str, dict[str, Any]] = {
    "dense": {"source": "dense"},
    "predicted": {"source": "sparge", "cdf": 0.3, "similarity": -1.0, "block_q": 16, "block_k": 16},
    "window, medium": {"source": "window", "window": [3, 5, 5], "block_q": 5, "block_k": 5},
    "window, large": {"source": "window", "window": [7, 7, 11], "block_q": 5, "block_k": 5},
}


@dataclass(frozen=True)
class Row:
    """One arm before fine-tuning (steps 0) and after. density: mean of its masks over the validation clips

    training: loss, mean of the last quarter of the steps (not a number before);  loss: on clips not trained on;
    gap: of that loss over the dense arm's of the same steps, in shares of it;  psnr in dB, ssim: its videos against
    the shipped model's dense ones, mean over prompts
    """

    arm: str
    steps: int
    density: float
    training: float
    loss: float
    gap: float
    psnr: float
    ssim: float
    label: str = MEASURED_HERE


def fine_tune(name: str, transformer: Any, clips: Clips, options: argparse.Namespace) -> list[float]:
    """Trains in place, with autocast to bfloat16 as the model was. Returns the loss of each step."""
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=options.learning_rate, weight_decay=0.01)
    transformer.train()

    def step(index: int) -> float:
        for group in optimizer.param_groups:
            group["lr"] = options.learning_rate * min(1.0, (index + 1) / 10)
        attached = attach_single_process(transformer, {"mask": ARMS[name]})
        try:
            with torch.autocast("cpu", torch.bfloat16), patch.object(single_process, "masked_attention", _attention):
                loss = flow_loss(transformer, clips, range(BATCH * index, BATCH * (index + 1)), torch.device("cpu"))
        finally:
            attached.detach()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    parts = {"transformer": transformer, "optimizer": optimizer}
    with Progress() as progress:
        return train(name.replace(", ", "-"), options.steps, parts, step, options.work, progress).losses


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: BlockMask, scale: float | None = None
) -> torch.Tensor:
    """As `masked_attention`, with the cheaper backward pass, where no row is empty. q, k, v: [B, H, N, D]"""
    allowed = token_mask(mask)
    if mask.heads != q.shape[1]:
        allowed = allowed.unflatten(0, q.shape[:2])
    return plain_attention(q, k, v, allowed).to(q.dtype)


@torch.no_grad()
def judge(name: str, pipeline: Any, clips: Clips, wanted: list[Video]) -> tuple[float, float, float, float]:
    """Density, loss, PSNR and SSIM of the pipeline's transformer under the arm's attention."""
    watched = Watched(DbspConfig.load({"mask": ARMS[name]}).mask)
    pipeline.transformer.eval()
    losses = []
    for index in range(VALIDATION):
        attached = attach_single_process(pipeline.transformer, DbspConfig(mask=watched))
        losses.append(float(flow_loss(pipeline.transformer, clips, range(index, index + 1), torch.device("cpu"))))
        attached.detach()
    mask = None if name == "dense" else ARMS[name]  # stock attention, as for the videos that all are compared with
    pairs = [
        (generate(pipeline, prompt, 0, STEPS, mask)[0].frames, video.frames)
        for prompt, video in zip(PROMPTS, wanted, strict=False)
    ]
    alike = [np.mean([measure(*pair) for pair in pairs]) for measure in (psnr, ssim)]
    return watched.density, float(np.mean(losses)), float(alike[0]), float(alike[1])


COLOURS = {
    "dense": MASKS["dense"],
    "predicted": MASKS["sparge"],
    "window, medium": MASKS["window"],
    "window, large": MASKS["large window"],
}


def draw(rows: list[Row]) -> Figure:
    steps = max(row.steps for row in rows)
    figure, axes = panels(
        "Are windows as good to train under as predicted masks?",
        f"{steps} steps under each mask (DSV's Fig. 15, in small); pale: before; {rows[0].label}",
        columns=2,
        height=4.6,
        width_ratios=(1.25, 1),
    )
    names = list(dict.fromkeys(row.arm for row in rows))
    for axis, field, number in ((axes[0, 0], "loss", "%.3f"), (axes[0, 1], "psnr", "%.1f")):
        for shift, tuned in ((-0.2, False), (0.2, True)):
            for row in rows:
                if bool(row.steps) is tuned and np.isfinite(getattr(row, field)):
                    at = names.index(row.arm) + shift
                    bars = axis.bar(at, getattr(row, field), 0.38, color=COLOURS[row.arm], alpha=1.0 if tuned else 0.4)
                    axis.bar_label(bars, fmt=number, fontsize=8.5, padding=2)
        density = {row.arm: row.density for row in rows}
        labels = [f"{name.replace(', ', ',' + chr(10))}\n({density[name]:.2f})" for name in names]
        axis.set_xticks(range(len(names)), labels)
        axis.grid(axis="x", visible=False)
        axis.set_xlabel("mask (density)")
    axes[0, 0].set(title="Less is better", ylabel="loss on clips not trained on")
    axes[0, 1].set(title="More is nearer", ylabel="PSNR against the shipped\nmodel's dense videos, dB")
    return figure


ARM_RESULTS = Result("dsv-windows", "Window masks beside predicted ones (DSV, Fig. 15)", Row, draw)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help=f"of fine-tuning, {BATCH} clips each")
    parser.add_argument("--clips", type=int, default=200, help="to fine-tune on, drawn")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--prompts", type=int, default=2, help="how many of the prompts")
    parser.add_argument("--seed", type=int, default=3, help="of clips and noise; 1000 more for unseen clips")
    parser.add_argument(
        "--work", type=Path, default=Path("out/over-training"), help="folder for clips and checkpoints"
    )
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the CSV and the PNG")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")

    def read(count: int, seed: int, no_caption: float) -> Clips:
        drawn = ["--data", f"{SYNTHETIC}:{count}", "--seed", str(seed), "--out", str(options.work)]
        return Clips.read(encode_clips(Settings.parse(drawn)), no_caption, seed, shift=3.0)

    clips, unseen = read(options.clips, options.seed, 0.1), read(VALIDATION, options.seed + UNSEEN, 0.0)
    pipeline = load_pipeline()
    shipped = pipeline.transformer
    wanted = [generate(pipeline, prompt, 0, STEPS)[0] for prompt in PROMPTS[: options.prompts]]
    rows: list[Row] = []
    for name in ARMS:
        tuned = copy.deepcopy(shipped)
        losses = fine_tune(name, tuned, clips, options)
        last = float(np.mean(losses[-max(1, options.steps // 4) :]))
        for model, steps, training in ((shipped, 0, float("nan")), (tuned, options.steps, last)):
            pipeline.register_modules(transformer=model)
            density, loss, noise, structure = judge(name, pipeline, unseen, wanted)
            dense = next((row.loss for row in rows if row.arm == "dense" and row.steps == steps), loss)
            rows.append(Row(name, steps, density, training, loss, loss / dense - 1, noise, structure))
            print(rows[-1], flush=True)
    ARM_RESULTS.publish(rows, options.out)


if __name__ == "__main__":
    main()
