"""Cost of sparsity in quality: sparse against dense videos of the small trained model, by mask source and density.

All in one process: a parallel run computes the same attention (see the tests), so it adds nothing.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from rich.progress import track

from dbsp_cli.mask_tools.fit import fit_recording
from scripts.results.colours import MASKS
from scripts.results.figures import legend_below, panels
from scripts.results.result import FOLDER, Result, Row
from scripts.training.trained_model.side_by_side import save_side_by_side
from scripts.training.trained_model.small_model import (
    MEASURED_HERE,
    PROMPTS,
    generate,
    load_pipeline,
    psnr,
    relative_l1,
    ssim,
)

SETTINGS: dict[str, list[dict[str, Any]]] = {
    "sparge cdf": [{"source": "sparge", "cdf": value} for value in (0.3, 0.6, 0.85, 0.95)],
    "sparge topk": [{"source": "sparge", "topk": value} for value in (0.15, 0.3, 0.6)],
    "sol": [{"source": "sol", "tau": value} for value in (2.0, 1.0, 0.5, 0.0)],
    "vsa, no gate": [{"source": "vsa", "sparsity": value, "tile": [2, 2, 4]} for value in (0.85, 0.7, 0.4)],
    "subblock": [{"source": "subblock", "sparsity": value, "multiple": 1} for value in (0.85, 0.7, 0.4)],
    "cube": [{"source": "cube", "topk": value, "tile": [2, 2, 4]} for value in (0.15, 0.3, 0.6)],
    "ssta": [
        {"source": "ssta", "topk": topk, "padding": padding, "tile": [2, 4, 4], "window": [1, 1, 1]}
        for topk, padding in ((18, "none"), (36, "none"), (72, "none"), (36, "absent"))
    ],
    "lowrank": [{"source": "lowrank", "topk": value} for value in (0.15, 0.3, 0.6)],
    "window": [{"source": "window", "window": list(value)} for value in ((1, 5, 15), (5, 5, 15), (9, 5, 15))],
    "radial": [{"source": "radial", "width": value} for value in (0.25, 0.5, 1.0)],
    "window + sparge cdf": [
        {"source": "union", "of": [{"source": "window", "window": [1, 3, 5]}, {"source": "sparge", "cdf": value}]}
        for value in (0.3, 0.6, 0.85)
    ],
}
UNSAID = ("source", "tile", "multiple")
"""Of a setting, what its source's name here says, or what is the same in all of its settings."""
SHOWN = ("sparge cdf", {"source": "sparge", "cdf": 0.85})
LOWRANK_RANK = 8  # of 24 dimensions


def blocks(setting: dict[str, Any], size: int) -> dict[str, Any]:
    """The whole mask setting. Learned blocks are not identically inside, so none is dense for that (similarity −1)."""
    if setting["source"] == "union":
        return {**setting, "of": [blocks(one, size) for one in setting["of"]]}
    extra = {"similarity": -1.0} if setting["source"] == "sparge" else {}
    return {**setting, **extra, "block_q": size, "block_k": size}


def measure(pipeline: Any, options: argparse.Namespace) -> Iterator[Row]:
    """density: mean over layers, steps and branches; psnr in dB and ssim of frames; error of latents"""
    fitted = {"path": str(fit_lowrank(pipeline, options))} if "lowrank" in options.sources else {}
    jobs = [(prompt, seed) for seed in range(options.seeds) for prompt in PROMPTS[: options.prompts]]
    for prompt, seed in track(jobs, "prompts and seeds"):
        dense, _ = generate(pipeline, prompt, seed, options.steps)
        for source in options.sources:
            for setting in SETTINGS[source][:: options.every]:
                mask = blocks(setting, options.block) | (fitted if source == "lowrank" else {})
                sparse, watched = generate(pipeline, prompt, seed, options.steps, mask)
                yield Row(
                    source=source,
                    setting=_in_words(setting),
                    prompt=prompt,
                    seed=seed,
                    density=watched.density,
                    psnr=psnr(sparse.frames, dense.frames),
                    ssim=ssim(sparse.frames, dense.frames),
                    relative_l1=relative_l1(sparse.latents, dense.latents),
                    steps=options.steps,
                    label=MEASURED_HERE,
                )


def fit_lowrank(pipeline: Any, options: argparse.Namespace) -> Path:
    """Fits projections to a dense video of a caption that is not measured. Returns their file."""
    folder = Path(tempfile.mkdtemp())
    recorder = {"source": "record_qk", "path": str(folder)}
    _, watched = generate(pipeline, PROMPTS[-1], options.seeds, options.steps, recorder)
    watched.source.write()
    fit_recording([folder], folder / "fitted.safetensors", LOWRANK_RANK)
    return folder / "fitted.safetensors"


def _in_words(setting: dict[str, Any]) -> str:
    if setting["source"] == "union":
        return " + ".join(map(_in_words, setting["of"]))
    return ", ".join(f"{key} {value}" for key, value in setting.items() if key not in UNSAID)


def draw(rows: list[Row]) -> Figure:
    figure, axes = panels(
        "What does sparsity cost, by source of masks?",
        f"Videos against dense ones of the same seed, {rows[0].label}\n"
        "Dots: single videos; lines: means over captions and seeds. Nearer: high PSNR and SSIM, low L1",
        columns=3,
        height=4.8,
    )
    for axis, name, label in zip(
        axes[0],
        ("psnr", "ssim", "relative_l1"),
        ("PSNR of frames, dB", "SSIM of frames", "Relative L1 of latents"),
        strict=True,
    ):
        for source in dict.fromkeys(row.source for row in rows):
            here, colour = [row for row in rows if row.source == source], MASKS[source.replace(" cdf", "")]
            axis.scatter([row.density for row in here], [getattr(row, name) for row in here], s=7, color=colour)
            means = _means(here, name)
            axis.plot([x for x, _ in means], [y for _, y in means], "o-", color=colour, label=source)
        axis.set(xlabel="density", title=label, xlim=(0, 1))
        axis.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "¼", "½", "¾", "1"])
    legend_below(figure, axes[0, 0])
    return figure


QUALITY = Result("quality", "Sparse against dense videos", draw)


def _means(rows: list[Row], name: str) -> list[tuple[float, float]]:
    by_setting = [
        [row for row in rows if row.setting == setting] for setting in dict.fromkeys(r.setting for r in rows)
    ]
    return sorted(
        (float(np.mean([row.density for row in here])), float(np.mean([getattr(row, name) for row in here])))
        for here in by_setting
    )


def save_frames(path: Path, pipeline: Any, options: argparse.Namespace) -> None:
    source, setting = SHOWN
    videos: dict[str, torch.Tensor] = {}
    for prompt in PROMPTS[: options.prompts]:
        dense, _ = generate(pipeline, prompt, 0, options.steps)
        sparse, watched = generate(pipeline, prompt, 0, options.steps, blocks(setting, options.block))
        videos[f"{prompt}: dense attention"] = dense.frames.movedim(1, -1)
        title = f"{prompt}: {source} {setting['cdf']}, density {watched.density:.2f}"
        videos[title] = sparse.frames.movedim(1, -1)
    title = "Does block-sparse attention draw what dense attention draws?"
    save_side_by_side(path, videos, title, f"Of each seed, dense above sparse; {MEASURED_HERE}, {options.steps} steps")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="seeds for each prompt")
    parser.add_argument("--prompts", type=int, default=3, help="how many of the prompts")
    parser.add_argument("--steps", type=int, default=6, help="denoising steps")
    parser.add_argument("--block", type=int, default=16, help="tokens to a side of a block")
    parser.add_argument("--every", type=int, default=1, help="take only each n-th setting of a source")
    parser.add_argument("--sources", nargs="+", choices=SETTINGS, default=list(SETTINGS), help="of masks")
    parser.add_argument("--frames", action="store_true", help="make the frames alone")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the CSV and the PNGs")
    options = parser.parse_args()
    pipeline = load_pipeline()
    if not options.frames:
        QUALITY.publish(list(measure(pipeline, options)), options.out)
    save_frames(options.out / "quality-frames.png", pipeline, options)


if __name__ == "__main__":
    main()
