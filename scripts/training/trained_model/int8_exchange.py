"""Cost of int8 in exchanges: videos of the small trained model with it against those without, and single attentions.

In one process, where what would be sent is rounded too: bitwise the same as on any number of ranks (see the tests).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.progress import track
from torch.nn.functional import scaled_dot_product_attention

import dbsp_diffusers
from dbsp_core.runtime import session as sessions
from dbsp_core.runtime.prepared import PreparedAttention
from dbsp_kernels.exchange import restore_rows, rows_of_tokens
from scripts.results.result import FOLDER, write_csv
from scripts.training.trained_model.small_model import (
    MEASURED_HERE,
    PROMPTS,
    Video,
    generate,
    load_pipeline,
    psnr,
    relative_l1,
    ssim,
)

MASKS: dict[str, dict[str, Any]] = {
    "dense": {"source": "dense"},
    "radial, width 0.5": {"source": "radial", "width": 0.5, "block_q": 16, "block_k": 16},
    "sparge, cdf 0.85": {"source": "sparge", "cdf": 0.85, "similarity": -1.0, "block_q": 16, "block_k": 16},
}


@dataclass(frozen=True)
class Row:
    """One video. psnr in dB and ssim of frames, and error of latents, against the same in the model's precision;
    attention_error: relative, of single dense attentions of the run without rounding, mean; worst_attention: the
    largest (both empty under other masks)"""

    mask: str
    prompt: str
    seed: int
    psnr: float
    ssim: float
    relative_l1: float
    attention_error: str
    worst_attention: str
    steps: int
    label: str = MEASURED_HERE


def measure(pipeline: Any, options: argparse.Namespace) -> Iterator[Row]:
    jobs = [
        (name, prompt, seed)
        for name in options.masks
        for seed in range(options.seeds)
        for prompt in PROMPTS[: options.prompts]
    ]
    for name, prompt, seed in track(jobs, "masks, prompts and seeds"):
        errors: list[float] = []
        exact = _video(pipeline, name, "model", prompt, seed, options.steps, errors if name == "dense" else None)
        rounded = _video(pipeline, name, "int8", prompt, seed, options.steps)
        of_attention = [f"{sum(errors) / len(errors):.1e}", f"{max(errors):.1e}"] if errors else ["", ""]
        likeness = psnr(rounded.frames, exact.frames), ssim(rounded.frames, exact.frames)
        off = relative_l1(rounded.latents, exact.latents)
        yield Row(name, prompt, seed, *likeness, off, *of_attention, options.steps)


def _video(
    pipeline: Any, mask: str, precision: str, prompt: str, seed: int, steps: int, errors: list[float] | None = None
) -> Video:
    """errors: takes the relative error that rounding makes in each attention"""
    attend = sessions.attend

    def watched(executor: PreparedAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *more: Any) -> Any:
        if errors is not None:
            errors.append(_error(q, k, v))
        return attend(executor, q, k, v, *more)

    dbsp_diffusers.enable(pipeline.transformer, {"mask": MASKS[mask], "precision": precision})
    try:
        with mock.patch.object(sessions, "attend", watched):
            return generate(pipeline, prompt, seed, steps)[0]
    finally:
        dbsp_diffusers.disable(pipeline.transformer)


def _error(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    sent = q.float(), k.float() - k.float().mean(dim=2, keepdim=True), v.float()
    rounded = scaled_dot_product_attention(*(restore_rows(rows_of_tokens(t), t.shape[-1], t.dtype) for t in sent))
    exact = scaled_dot_product_attention(q.float(), k.float(), v.float())
    return float((rounded - exact).norm() / exact.norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2, help="seeds for each prompt")
    parser.add_argument("--prompts", type=int, default=3, help="how many of the prompts")
    parser.add_argument("--steps", type=int, default=6, help="denoising steps")
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=list(MASKS))
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the CSV")
    options = parser.parse_args()
    rows = list(measure(load_pipeline(), options))
    write_csv("int8-videos", rows, options.out)
    for name in options.masks:
        here = [row for row in rows if row.mask == name]
        mean = {of: sum(getattr(row, of) for row in here) / len(here) for of in ("psnr", "ssim", "relative_l1")}
        print(f"{name:18s} PSNR {mean['psnr']:.1f} dB, SSIM {mean['ssim']:.4f}, latents off {mean['relative_l1']:.1e}")


if __name__ == "__main__":
    main()
