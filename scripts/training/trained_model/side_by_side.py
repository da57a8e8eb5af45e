"""Frames of a dense and of a block-sparse video, one above the other."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from dbsp_core.reports.style import STYLE, WIDTH, heading
from dbsp_core.utils.files import write_atomically

SHOWN = 6  # frames of each video, equally spread


@torch.no_grad()
def decode_video(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """float32[F, H, W, 3] in [0, 1] of standardised latents [1, C, f, h, w]."""
    mean, std = (torch.tensor(each).view(1, -1, 1, 1, 1) for each in (vae.config.latents_mean, vae.config.latents_std))
    video: torch.Tensor = vae.decode(latents * std + mean).sample[0]
    return ((video + 1) / 2).clamp(0, 1).permute(1, 2, 3, 0)


def save_side_by_side(path: Path, videos: dict[str, torch.Tensor], title: str, note: str = "") -> None:
    """Some frames of each video as PNG, whole or not at all. videos: float32[F, H, W, 3], by the title of its row"""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    shown = torch.linspace(0, min(map(len, videos.values())) - 1, SHOWN).round().long()
    content = io.BytesIO()
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, 0.8 + 1.24 * len(videos)), layout="constrained")
        heading(figure, title, note)
        lines = figure.subplots(len(videos), 1, squeeze=False)[:, 0]
        for axes, (name, video) in zip(lines, videos.items(), strict=True):
            white = video.new_ones((*video.shape[1:2], 4, 3))
            frames = [part for frame in video[shown] for part in (frame, white)][:-1]
            axes.imshow(torch.cat(frames, dim=1).numpy())
            axes.set_title(name, loc="left")
            axes.axis("off")
        figure.savefig(content, format="png")
    write_atomically(path, content.getvalue())
