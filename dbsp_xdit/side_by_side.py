"""Frames of a dense and of a block-sparse video, one above the other."""

from __future__ import annotations

from pathlib import Path

import torch

__all__ = ["decode_video", "save_side_by_side"]


@torch.no_grad()
def decode_video(model: Path, latents: torch.Tensor) -> torch.Tensor:
    """float32[F, H, W, 3] in [0, 1] of standardised latents [1, C, f, h, w], by the checkpoint's Wan autoencoder."""
    from diffusers import AutoencoderKLWan

    vae = AutoencoderKLWan.from_pretrained(model / "vae", torch_dtype=torch.float32, local_files_only=True)
    mean, std = (torch.tensor(each).view(1, -1, 1, 1, 1) for each in (vae.config.latents_mean, vae.config.latents_std))
    video: torch.Tensor = vae.decode(latents * std + mean).sample[0]
    return ((video + 1) / 2).clamp(0, 1).permute(1, 2, 3, 0)


def save_side_by_side(path: Path, dense: torch.Tensor, sparse: torch.Tensor, titles: tuple[str, str]) -> None:
    """Five frames of each video, evenly spread, as PNG. dense, sparse: [F, H, W, 3]; titles: of the two rows"""
    from matplotlib.figure import Figure

    shown = torch.linspace(0, len(dense) - 1, 5).round().long()
    figure = Figure(figsize=(12, 3.6), layout="constrained")
    for axes, video, title in zip(figure.subplots(2, 1), (dense, sparse), titles, strict=True):
        axes.imshow(torch.cat(list(video[shown]), dim=1).numpy())
        axes.set_title(title, fontsize=9)
        axes.axis("off")
    figure.savefig(path, dpi=110, format="png")
