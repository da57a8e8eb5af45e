"""Does training through a mask heal what the mask costs? The question of DSV (Tan et al., 2025), asked small.

The small trained model is fine-tuned through its predicted masks on two ranks, by scripts/train_video, and compared
with what it was and with a control that is fine-tuned densely on the same clips: videos against the shipped model's
dense ones, and the loss on clips that none of them saw.
"""

from __future__ import annotations

import argparse
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
from matplotlib.figure import Figure

from dbsp_core.reports.style import MASKS
from scripts.results.figures import legend_below, panels
from scripts.results.result import FOLDER, Result
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
from tests.support.single_process import attach_single_process

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


def fine_tune(options: argparse.Namespace, mask: dict[str, Any], work: Path) -> None:
    """Leaves a checkpoint and the loss of every step in WORK."""
    work.mkdir(parents=True, exist_ok=True)
    config = work / "masks.yaml"
    config.write_text(yaml.safe_dump({"mask": mask}), encoding="utf-8")
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


MODELS = {
    "shipped": "as shipped",
    "tuned dense": "tuned without\nmasks (control)",
    "tuned sparse": "tuned through\nmasks",
}


def draw(rows: list[Row]) -> Figure:
    density = next(row.density for row in rows if row.attention == "sparse")
    steps = max(row.steps for row in rows)
    figure, axes = panels(
        "Does training through masks heal what they cost?",
        f"{steps} steps of fine-tuning, masks of density {density:.2f}; {rows[0].label}",
        columns=2,
    )
    left, right = axes[0]
    models = [name for name in MODELS if any(row.model == name for row in rows)]
    colours = {"dense": MASKS["dense"], "sparse": MASKS["sparge"]}
    for axis, field, number in ((left, "loss", "%.2f"), (right, "psnr", "%.1f")):
        for shift, attention in ((-0.2, "dense"), (0.2, "sparse")):
            here = [row for row in rows if row.attention == attention and np.isfinite(getattr(row, field))]
            places = [models.index(row.model) + shift for row in here]
            heights = [getattr(row, field) for row in here]
            bars = axis.bar(places, heights, 0.38, color=colours[attention], label=f"run with {attention} attention")
            axis.bar_label(bars, fmt=number, fontsize=10, padding=2)
        axis.set_xticks(range(len(models)), [MODELS[name] for name in models])
        axis.grid(axis="x", visible=False)
        axis.margins(y=0.12)
    left.set(title="Less is better", ylabel="validation loss")
    right.set(title="More is nearer", ylabel="PSNR against the shipped\nmodel's dense videos, dB")
    legend_below(figure, left)
    return figure


HEALING = Result("healing", "Fine-tuned through its masks, before and after", Row, draw)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--cdf", type=float, default=0.3, help="of SpargeAttn's masks")
    parser.add_argument("--steps", type=int, default=200, help="of fine-tuning, two clips each")
    parser.add_argument("--clips", type=int, default=32, help="to fine-tune on, drawn")
    parser.add_argument("--learning-rate", type=float, default=2e-4)
    parser.add_argument("--prompts", type=int, default=3, help="how many of the prompts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--work", type=Path, default=Path("out/healing"), help="folder for clips and checkpoints")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the CSV and the PNG")
    options = parser.parse_args()
    torch.set_num_threads(2)
    mask = {"source": "sparge", "cdf": options.cdf, "similarity": -1.0, "block_q": 16, "block_k": 16}

    unseen = ["--data", f"{SYNTHETIC}:{WATCHED}", "--seed", str(options.seed + UNSEEN), "--out", str(options.work)]
    folder = encode_clips(Settings.parse(unseen))
    clips = Clips.read(folder, no_caption=0.0, seed=options.seed + UNSEEN, shift=3.0)
    pipeline = load_pipeline()
    wanted = [generate(pipeline, prompt, 0, 6)[0] for prompt in PROMPTS[: options.prompts]]
    rows = measure("shipped", pipeline, mask, wanted, clips, 0)
    for name, trained_through in (("tuned sparse", mask), ("tuned dense", {"source": "dense"})):
        work = options.work / name.replace(" ", "-")
        fine_tune(options, trained_through, work)
        tuned = type(pipeline.transformer).from_pretrained(work / "transformer", torch_dtype=torch.float32)
        pipeline.register_modules(transformer=tuned.eval())
        rows += measure(name, pipeline, mask, wanted, clips, options.steps)
    HEALING.publish(rows, options.out)


if __name__ == "__main__":
    main()
