"""Does training through a mask heal what the mask costs? The question of DSV (Tan et al., 2025), asked small.

The small trained model is fine-tuned through its predicted masks on two ranks, by scripts/train_video, and compared
with what it was and with a control that is fine-tuned densely on the same clips: videos against the shipped model's
dense ones, and the loss on clips that none of them saw.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from matplotlib import pyplot
from matplotlib.figure import Figure

from dbsp_diffusers.reference import attach_single_process
from scripts.reproduce.common import RESULTS, publish
from scripts.training.trained_model.small_model import (
    MEASURED_HERE,
    PROMPTS,
    Video,
    generate,
    load_pipeline,
    psnr,
    ssim,
)
from scripts.training.video.clips import Clips, encode_clips
from scripts.training.video.fine_tuning import flow_loss
from scripts.training.video.settings import SYNTHETIC, Settings

WATCHED = 12  # clips that validation sees, each at one noise level
UNSEEN = 1000  # added to the seed of the training clips


@dataclass(frozen=True)
class Row:
    """One model and attention. density: mean of the masks; loss: validation; psnr in dB and ssim: against dense videos
    of the shipped model, mean over prompts; steps: of fine-tuning"""

    model: str
    attention: str
    density: float
    loss: float
    psnr: float
    ssim: float
    steps: int
    label: str = MEASURED_HERE


def measure(
    name: str, pipeline: Any, mask: dict[str, Any], wanted: list[Video], clips: Clips, steps: int
) -> list[Row]:
    """Dense, then under masks. steps: that the model was fine-tuned for"""
    rows = []
    for attention, setting in (("dense", None), ("sparse", mask)):
        found, densities = [], []
        for number, video in enumerate(wanted):
            if not (setting or steps):
                found.append((float("inf"), 1.0))  # these are the videos that all are compared with
                continue
            made, watched = generate(pipeline, PROMPTS[number], 0, 6, setting)
            densities += [watched.density] if setting else []
            found.append((psnr(made.frames, video.frames), ssim(made.frames, video.frames)))
        with _masks(pipeline.transformer, setting), torch.no_grad():
            losses = [
                float(flow_loss(pipeline.transformer, clips, range(index, index + 1), torch.device("cpu")))
                for index in range(WATCHED)
            ]
        quality = [float(np.mean(values)) for values in zip(*found, strict=True)]
        density = float(np.mean(densities or [1.0]))
        rows.append(Row(name, attention, density, float(np.mean(losses)), *quality, steps))
        print(rows[-1], flush=True)
    return rows


@contextmanager
def _masks(transformer: Any, mask: dict[str, Any] | None) -> Iterator[None]:
    attached = attach_single_process(transformer, {"mask": mask}) if mask else None
    try:
        yield
    finally:
        if attached is not None:
            attached.detach()


def fine_tune(options: argparse.Namespace, mask: dict[str, Any], work: Path) -> list[float]:
    """Returns the loss of every step."""
    work.mkdir(parents=True, exist_ok=True)
    config = work / "masks.yaml"
    config.write_text(yaml.safe_dump({"mask": mask}))
    arguments = {
        "--data": f"{SYNTHETIC}:{options.clips}",
        "--config": config,
        "--out": work,
        "--ranks": 2,
        "--sequence-parallel": 2,
        "--steps": options.steps,
        "--learning-rate": options.learning_rate,
        "--save-every": 25,
        "--seed": options.seed,
    }
    subprocess.run(
        [
            sys.executable,
            "-m",
            "scripts.training.video",
            *(str(part) for pair in arguments.items() for part in pair),
        ],
        check=True,
    )
    with (work / "loss.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def draw(rows: list[Row], losses: dict[str, list[float]]) -> Figure:
    figure, panels = pyplot.subplots(1, 3, figsize=(13, 4.0), layout="constrained")
    for colour, (name, one) in zip(("C1", "C0"), losses.items(), strict=True):
        window = min(25, len(one))
        smooth = np.convolve(one, np.ones(window) / window, "valid")
        panels[0].plot(range(window - 1, len(one)), smooth, color=colour, label=f"{name}, mean of {window} steps")
    panels[0].set(xlabel="step", ylabel="training loss", ylim=(0, None))
    panels[0].legend(fontsize=8)
    names = [_label(row) for row in rows]
    colours = ["C0" if row.attention == "dense" else "C1" for row in rows]
    panels[1].bar(names, [row.loss for row in rows], color=colours)
    panels[1].set(ylabel="validation loss")
    shown = [row for row in rows if np.isfinite(row.psnr)]
    panels[2].bar(
        [_label(row) for row in shown],
        [row.psnr for row in shown],
        color=["C0" if row.attention == "dense" else "C1" for row in shown],
    )
    panels[2].set(ylabel="PSNR against the shipped model's\ndense videos, dB")
    for axes in panels[1:]:
        axes.tick_params(axis="x", labelsize=8)
    density = next(row.density for row in rows if row.attention == "sparse")
    figure.suptitle(f"Fine-tuning through masks of density {density:.2f}, {MEASURED_HERE}")
    return figure


def _label(row: Row) -> str:
    return "\n".join([*row.model.split(), f"({row.attention})"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--cdf", type=float, default=0.3, help="of SpargeAttn's masks")
    parser.add_argument("--steps", type=int, default=200, help="of fine-tuning, two clips each")
    parser.add_argument("--clips", type=int, default=32, help="to fine-tune on, drawn")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--prompts", type=int, default=3, help="how many of the prompts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("out/healing"), help="folder for clips and checkpoints")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the CSV and the PNG")
    options = parser.parse_args()
    torch.set_num_threads(2)
    mask = {"source": "sparge", "cdf": options.cdf, "similarity": -1.0, "block_q": 16, "block_k": 16}

    unseen = ["--data", f"{SYNTHETIC}:{WATCHED}", "--seed", str(options.seed + UNSEEN), "--out", str(options.work)]
    folder = encode_clips(Settings.parse(unseen))
    clips = Clips.read(folder, no_caption=0.0, seed=options.seed + UNSEEN, shift=3.0)
    pipeline = load_pipeline()
    wanted = [generate(pipeline, prompt, 0, 6)[0] for prompt in PROMPTS[: options.prompts]]
    rows = measure("shipped", pipeline, mask, wanted, clips, 0)
    losses = {}
    for name, trained_through in (("tuned sparse", mask), ("tuned dense", {"source": "dense"})):
        work = options.work / name.replace(" ", "-")
        losses[name] = fine_tune(options, trained_through, work)
        tuned = type(pipeline.transformer).from_pretrained(work / "transformer", torch_dtype=torch.float32)
        pipeline.register_modules(transformer=tuned.eval())
        rows += measure(name, pipeline, mask, wanted, clips, options.steps)
    publish("healing", "Fine-tuned through its masks, before and after", rows, draw(rows, losses), options.out)


if __name__ == "__main__":
    main()
