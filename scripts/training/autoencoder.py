"""Stages 1 and 2: diffusers' AutoencoderKLWan with few channels, trained to give pictures back; the training set's
latents, encoded once and kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResidualBlock
from rich.progress import Progress
from safetensors.torch import load_file, save

from dbsp_core.utils.files import write_atomically
from scripts.training.loop import cosine, generator_of, train
from scripts.training.muon import optimizers_of
from scripts.training.world import FRAMES, HEIGHT, WIDTH, Scene, render

KL = 5e-5
CHUNK = 20  # videos to a file of latents: what is lost when the run is stopped
COLOUR = 0.5  # weight of the error of differences between channels: grey is learned soon, colour late


@dataclass(frozen=True)
class Clips:
    """Clips that are shown: so many steps, each with `count` pieces of videos of this size."""

    steps: int
    count: int
    frames: int
    height: int
    width: int


def make_autoencoder(width: int = 16) -> Any:
    """4 × in time, 8 × in space, 16 channels, as Wan2.1's; 2×2 pixels enter as one, which makes it cheap."""
    vae = AutoencoderKLWan(
        base_dim=width,
        z_dim=16,
        dim_mult=[1, 2, 2],
        num_res_blocks=1,
        temperal_downsample=[True, True],
        in_channels=12,
        out_channels=12,
        patch_size=2,
        latents_mean=[0.0] * 16,
        latents_std=[1.0] * 16,
    )
    _begin_clear(vae)
    return vae


@torch.no_grad()
def _begin_clear(vae: Any) -> None:
    """Latents begin nearly without noise, and residual branches at zero: else colours stay grey for long."""
    vae.quant_conv.weight[16:].zero_()
    vae.quant_conv.bias[16:].fill_(-6.0)
    for module in vae.modules():
        if isinstance(module, WanResidualBlock):
            module.conv2.weight.zero_()


def train_autoencoder(
    vae: Any, name: str, clips: Sequence[Clips], rate: float, seed: int, folder: Path, progress: Progress
) -> list[float]:
    """Trains in place, and returns the losses: L1 of pixels and of colours, and a little KL divergence.

    name: of the run, for its checkpoint; clips: one kind after the other, under one schedule of the learning rate
    """
    convolutions = [p for p in vae.parameters() if p.ndim >= 4 and p[0].numel() > 1]  # norms have such shapes too
    optimizers = optimizers_of(vae, convolutions, rate)
    kinds = [kind for kind in clips for _ in range(kind.steps)]

    def step(index: int) -> float:
        generator = generator_of(seed, index)
        share = cosine(index, len(kinds), min(50, len(kinds) // 10))
        for optimizer in optimizers.values():
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = (rate if optimizer is optimizers["muon"] else rate / 4) * share
        shown = _clips(kinds[index], index, seed, generator)
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(shown).latent_dist
            noise = torch.randn(posterior.mean.shape, generator=generator)
            back = vae.decode(posterior.mean + posterior.std * noise).sample
        difference = back.float() - shown
        error = difference.abs().mean()
        colour = (difference - difference.roll(1, dims=1)).abs().mean()
        spread = (posterior.mean.float() ** 2 + posterior.var.float() - 1 - posterior.logvar.float()).mean() / 2
        (error + COLOUR * colour + KL * spread).backward()
        for optimizer in optimizers.values():
            optimizer.step()
        return error.item()

    return train(name, len(kinds), {"vae": vae, **optimizers}, step, folder, progress)


def _clips(kind: Clips, index: int, seed: int, generator: torch.Generator) -> torch.Tensor:
    """float32[count, 3, frames, height, width], cut from anywhere in videos that no other step sees."""
    clips = []
    for item in range(kind.count):
        start, top, left = (
            int(torch.randint(whole - part + 1, (1,), generator=generator)) if part < whole else 0
            for whole, part in ((FRAMES, kind.frames), (HEIGHT, kind.height), (WIDTH, kind.width))
        )
        clip = render(Scene.draw(seed, index * kind.count + item), kind.frames, start)
        clips.append(clip[:, :, top : top + kind.height, left : left + kind.width])
    return torch.stack(clips)


@torch.no_grad()
def encode(vae: Any, videos: torch.Tensor) -> torch.Tensor:
    """float32[b, 3, f, h, w] → float32[b, 16, 1 + (f − 1) / 4, h / 8, w / 8], not standardised."""
    with torch.autocast("cpu", torch.bfloat16):
        latents: torch.Tensor = vae.encode(videos).latent_dist.mean
    return latents.float()


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
