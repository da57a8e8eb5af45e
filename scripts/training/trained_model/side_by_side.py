"""Frames of a dense and of a block-sparse video, one above the other."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from dbsp_core.utils.atomic_io import write_atomically

__all__ = ["SHOWN", "decode_video", "save_side_by_side"]

SHOWN = 6
"""Frames of each video, evenly spread."""


@torch.no_grad()
def decode_video(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """float32[F, H, W, 3] in [0, 1] of standardised latents [1, C, f, h, w].

    vae: diffusers' AutoencoderKLWan, in float32
    """
    mean, std = (torch.tensor(each).view(1, -1, 1, 1, 1) for each in (vae.config.latents_mean, vae.config.latents_std))
    video: torch.Tensor = vae.decode(latents * std + mean).sample[0]
    return ((video + 1) / 2).clamp(0, 1).permute(1, 2, 3, 0)


def save_side_by_side(path: Path, videos: dict[str, torch.Tensor], title: str) -> None:
    """Some frames of each video as PNG, whole or not at all. videos: float32[F, H, W, 3], by the title of its row"""
    from matplotlib.figure import Figure

    shown = torch.linspace(0, min(map(len, videos.values())) - 1, SHOWN).round().long()
    figure = Figure(figsize=(12, 0.5 + 1.55 * len(videos)), layout="constrained")
    figure.suptitle(title, fontsize=11)
    for axes, (name, video) in zip(figure.subplots(len(videos), 1, squeeze=False)[:, 0], videos.items(), strict=True):
        axes.imshow(torch.cat(list(video[shown]), dim=1).numpy())
        axes.set_title(name, fontsize=9)
        axes.axis("off")
    content = io.BytesIO()
    figure.savefig(content, dpi=110, format="png")
    write_atomically(path, content.getvalue())
