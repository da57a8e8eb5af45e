"""Videos of the small trained model, in one process, dense or block-sparse, and how far two videos are apart."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from skimage.metrics import peak_signal_noise_ratio, structural_similarity

from dbsp_cli.tiny_models import trained_weights
from dbsp_core.config import DbspConfig
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.sources import LocalQK, MaskRequest
from dbsp_core.sources.base import Changes
from scripts.training.trained_model.side_by_side import decode_video
from tests.support.single_process import attach_single_process

MEASURED_HERE = "measured on the small trained model"
HEIGHT, WIDTH, FRAMES = 144, 240, 33  # its training's: 9 × 9 × 15 = 1,215 tokens
PROMPTS = (
    "a red ball bounces over a blue checkered floor",
    "a yellow square slides left over a green plain floor",
    "a blue triangle turns over a yellow checkered floor",
    "a green ball hides behind a pillar over a red plain floor",
)


@dataclass(frozen=True)
class Video:
    """frames: float32[F, 3, H, W] in [0, 1];  latents: float32[1, 16, f, h, w]"""

    frames: torch.Tensor
    latents: torch.Tensor


@dataclass
class Watched:
    """A mask source that keeps every mask it gives, by request, or its density alone."""

    source: Any
    keep: bool = False
    masks: dict[MaskRequest, BlockMask] = field(default_factory=dict)
    densities: list[float] = field(default_factory=list)

    @property
    def changes(self) -> Changes:
        return self.source.changes

    @property
    def density(self) -> float:
        return sum(self.densities) / len(self.densities)

    def grid(self, request: MaskRequest) -> BlockGrid:
        return self.source.grid(request)

    def cache_key(self, request: MaskRequest) -> Hashable:
        return self.source.cache_key(request)

    def mask(self, request: MaskRequest, *tokens: LocalQK) -> BlockMask:
        mask = self.source.mask(request, *tokens)
        self.densities.append(float(mask.bits.float().mean()))
        if self.keep:
            self.masks[request] = mask
        return mask


def load_pipeline() -> Any:
    """diffusers' WanPipeline with the shipped weights, in float32."""
    from diffusers import WanPipeline
    from diffusers.utils import logging

    logging.disable_progress_bar()
    pipeline = WanPipeline.from_pretrained(trained_weights(), torch_dtype=torch.float32, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def generate(
    pipeline: Any,
    prompt: str,
    seed: int,
    steps: int,
    mask: dict[str, Any] | None = None,
    keep: bool = False,
    guidance: float = 3.0,
) -> tuple[Video, Watched]:
    """A video and the masks' statistics. mask: a source's settings; None: dense, every mask full."""
    watched = Watched(DbspConfig.load({"mask": mask or {"source": "dense"}}).mask, keep)
    attachment = attach_single_process(pipeline.transformer, DbspConfig(mask=watched)) if mask else None
    try:
        latents = pipeline(
            prompt=prompt,
            negative_prompt="",
            height=HEIGHT,
            width=WIDTH,
            num_frames=FRAMES,
            num_inference_steps=steps,
            guidance_scale=guidance,
            generator=torch.Generator().manual_seed(seed),
            output_type="latent",
        ).frames
    finally:
        if attachment is not None:
            attachment.detach()
    return Video(decode_video(pipeline.vae, latents).permute(0, 3, 1, 2), latents), watched


def psnr(frames: torch.Tensor, reference: torch.Tensor) -> float:
    """Peak signal-to-noise ratio in dB of frames in [0, 1], over the whole video; infinite where they are equal."""
    return float(peak_signal_noise_ratio(reference.numpy(), frames.numpy(), data_range=1.0))


def ssim(frames: torch.Tensor, reference: torch.Tensor) -> float:
    """Structural similarity of float32[F, 3, H, W], mean over frames, Gaussian window (Wang et al., 2004, §III.B)."""
    setting = {"gaussian_weights": True, "sigma": 1.5, "use_sample_covariance": False, "data_range": 1.0}
    pairs = zip(reference.numpy(), frames.numpy(), strict=True)
    return float(np.mean([structural_similarity(a, b, channel_axis=0, **setting) for a, b in pairs]))


def relative_l1(latents: torch.Tensor, reference: torch.Tensor) -> float:
    """Σ|latents − reference| / Σ|reference|."""
    return float((latents - reference).abs().sum() / reference.abs().sum())
