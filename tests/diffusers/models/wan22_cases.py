"""Whole pipelines of Wan's family, Wan2.2's two transformers among them, and what one process makes with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tests.support.models.tiny_pipelines import attach_pipeline, load
from tests.support.models.tiny_transformers import LATENTS, make_tiny_transformer
from tests.support.references import by_first_rank

SIZE = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 4, "guidance_scale": 2.0}
MASK = {"source": "synthetic", "density": 0.4, "block_q": 16, "block_k": 16}


def make_image(seed: int = 0, height: int = 64, width: int = 96) -> Any:
    from PIL import Image

    return Image.fromarray((np.random.RandomState(seed).rand(height, width, 3) * 255).astype("uint8"))


def make_pipe(kind: str, folder: str) -> tuple[Any, dict[str, Any]]:
    """Returns a tiny pipeline, and the arguments of its calls next to SIZE. folder: of a tiny Wan2.1"""
    import diffusers

    parts = dict(load("wan", folder).components)
    image: dict[str, Any] = {"image": make_image()}
    if kind == "a14b":
        parts |= {"transformer_2": make_tiny_transformer("wan", seed=7, **LATENTS), "boundary_ratio": 0.875}
        parts["transformer"] = make_tiny_transformer("wan", seed=6, **LATENTS)
        return diffusers.WanPipeline(**parts), {}
    if kind == "ti2v":
        return diffusers.WanPipeline(**parts | {"expand_timesteps": True}), {}
    parts.pop("transformer_2", None)
    if kind == "vace with references":
        transformer = make_tiny_transformer("vace", vace_in_channels=96, **LATENTS)
        pipe = diffusers.WanVACEPipeline(**parts | {"transformer": transformer})
        return pipe, {"video": [make_image(seed) for seed in range(5)], "reference_images": [[make_image(9)]]}
    if kind == "ti2v of an image":
        return diffusers.WanImageToVideoPipeline(**parts | {"expand_timesteps": True}), image
    from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel

    sizes = {"hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    with torch.random.fork_rng():
        torch.manual_seed(5)
        encoder = CLIPVisionModel(CLIPVisionConfig(**sizes, image_size=32, patch_size=8)).eval()
    processor = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    parts |= {"transformer": make_tiny_transformer("wan-i2v", **LATENTS | {"in_channels": 36})}
    parts |= {"image_encoder": encoder}
    return diffusers.WanImageToVideoPipeline(**parts, image_processor=processor), image


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


@by_first_rank
def one_process(
    kind: str, folder: str, config: dict[str, Any], options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns latents with dense attention, and with a configuration's."""
    pipe, own = make_pipe(kind, folder)
    return latents(pipe, own, **options), alone(pipe, config, own, **options)
