"""Stage 1, the autoencoder: diffusers' AutoencoderKLWan with few channels, trained to give pictures back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResidualBlock
from loop import History, cosine, generator_of, train
from muon import optimizers_of
from rich.progress import Progress
from world import FRAMES, HEIGHT, WIDTH, Scene, render

__all__ = ["encode", "make_autoencoder", "train_autoencoder"]

CLIP = 9  # frames to a training clip
CROP = 64  # pixels to a side of the early clips; the later ones are whole frames
KL = 5e-5
COLOUR = 0.5  # weight of the error of differences between channels: grey is learned soon, colour late
LEARNING_RATE = 6e-3


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


def train_autoencoder(vae: Any, steps: int, batch: int, seed: int, folder: Path, progress: Progress) -> History:
    """Trains in place: L1 of pixels and of colours, and a little KL divergence.

    The last third of the steps sees whole frames.
    """
    convolutions = [p for p in vae.parameters() if p.ndim >= 4 and p[0].numel() > 1]  # norms have such shapes too
    optimizers = optimizers_of(vae, convolutions, LEARNING_RATE)

    def step(index: int) -> float:
        generator = generator_of(seed, index)
        share = cosine(index, steps, min(50, steps // 10))
        for optimizer in optimizers.values():
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = (LEARNING_RATE if optimizer is optimizers["muon"] else LEARNING_RATE / 4) * share
        clips = _clips(index, batch, seed, index >= 2 * steps // 3, generator)
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(clips).latent_dist
            noise = torch.randn(posterior.mean.shape, generator=generator)
            back = vae.decode(posterior.mean + posterior.std * noise).sample
        difference = back.float() - clips
        error = difference.abs().mean()
        colour = (difference - difference.roll(1, dims=1)).abs().mean()
        spread = (posterior.mean.float() ** 2 + posterior.var.float() - 1 - posterior.logvar.float()).mean() / 2
        (error + COLOUR * colour + KL * spread).backward()
        for optimizer in optimizers.values():
            optimizer.step()
        return error.item()

    return train("autoencoder", steps, {"vae": vae, **optimizers}, step, folder, progress)


def _clips(index: int, batch: int, seed: int, whole: bool, generator: torch.Generator) -> torch.Tensor:
    """float32[b, 3, CLIP, h, w]: `batch` crops, or a quarter as many whole frames of about the same cost."""
    count = max(1, batch // 4) if whole else batch
    clips = []
    for item in range(count):
        start = int(torch.randint(FRAMES - CLIP + 1, (1,), generator=generator))
        clip = render(Scene.draw(seed, index * batch + item), CLIP, start)
        if not whole:
            top = int(torch.randint(HEIGHT - CROP + 1, (1,), generator=generator))
            left = int(torch.randint(WIDTH - CROP + 1, (1,), generator=generator))
            clip = clip[:, :, top : top + CROP, left : left + CROP]
        clips.append(clip)
    return torch.stack(clips)


@torch.no_grad()
def encode(vae: Any, videos: torch.Tensor) -> torch.Tensor:
    """float32[b, 3, f, h, w] → float32[b, 16, 1 + (f − 1) / 4, h / 8, w / 8], not standardised."""
    with torch.autocast("cpu", torch.bfloat16):
        latents: torch.Tensor = vae.encode(videos).latent_dist.mean
    return latents.float()
