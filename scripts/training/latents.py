"""Stage 2: the videos of the training set, encoded once and kept, so that stage 3 reads latents alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from safetensors.torch import load_file, save

from dbsp_core.utils.files import write_atomically
from scripts.training.autoencoder import encode
from scripts.training.world import Scene, render

CHUNK = 20  # videos to a file: what is lost when the run is stopped


def encode_videos(vae: Any, count: int, seed: int, folder: Path, progress: Progress) -> torch.Tensor:
    """Returns float16[count, 16, f, h, w], not standardised."""
    task = progress.add_task("latents", total=count)
    chunks = []
    for first in range(0, count, CHUNK):
        path = folder / f"latents-{first:05d}.safetensors"
        size = min(CHUNK, count - first)
        if not path.is_file():
            videos = [encode(vae, render(Scene.draw(seed, first + item))[None]) for item in range(size)]
            write_atomically(path, save({"latents": torch.cat(videos).half()}))
        chunks.append(load_file(path)["latents"])
        progress.update(task, completed=first + size)
    return torch.cat(chunks)


def standardise(vae: Any, latents: torch.Tensor) -> torch.Tensor:
    """Notes each channel's mean and deviation in the autoencoder's config. Returns latents that have 0 and 1."""
    by_channel = latents.float().transpose(0, 1).flatten(1)
    mean, std = by_channel.mean(1), by_channel.std(1)
    vae.register_to_config(latents_mean=mean.tolist(), latents_std=std.tolist())
    shape = (1, -1, 1, 1, 1)
    return ((latents.float() - mean.view(shape)) / std.view(shape)).half()
