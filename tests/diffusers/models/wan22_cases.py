"""Whole pipelines of Wan's family, Wan2.2's two transformers among them, and what one process makes with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.support.models.tiny_pipelines import attach_pipeline, load
from tests.support.models.tiny_transformers import LATENTS, make_tiny_transformer

SIZE = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 4, "guidance_scale": 2.0}
MASK = {"source": "synthetic", "density": 0.4, "block_q": 16, "block_k": 16}


def make_image(seed: int = 0, height: int = 64, width: int = 96) -> Any:
    from PIL import Image

    return Image.fromarray((np.random.RandomState(seed).rand(height, width, 3) * 255).astype("uint8"))


def make_pipe(kind: str, folder: str) -> Any:
    """Returns a tiny pipeline of Wan2.2: "a14b", with two transformers, or "ti2v". folder: of a tiny Wan2.1"""
    import diffusers

    parts = dict(load("wan", folder).components)
    if kind == "ti2v":
        return diffusers.WanPipeline(**parts | {"expand_timesteps": True})
    first, second = (make_tiny_transformer("wan", seed=seed, **LATENTS) for seed in (6, 7))
    return diffusers.WanPipeline(**parts | {"transformer": first, "transformer_2": second, "boundary_ratio": 0.875})


def latents(pipe: Any, options: dict[str, Any], **more: Any) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(3)
    return pipe(prompt="a red ball", generator=generator, output_type="latent", **SIZE | options | more).frames


def alone(pipe: Any, config: dict[str, Any], options: dict[str, Any], **more: Any) -> torch.Tensor:
    """Returns the latents of one process, in which a pipeline's transformers take turns."""
    attached = attach_pipeline(pipe, config)
    try:
        return latents(pipe, options, **more)
    finally:
        for single in attached:
            single.detach()
