"""What the workers run: xfuser's guidance and data parallelism around db-SP."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch

from tests.support.references import kept_from_rank_0, pass_alone
from tests.support.single_process import attach_single_process
from tests.xdit.xdit_cases import XditCase, differences_of


def run_image_to_video(rank: int, world: int, folder: str, config: dict[str, Any]) -> tuple[float, float]:
    """xfuser's Wan image-to-video pipeline, which runs the branches of guidance on two groups of ranks.

    returns: largest differences of the latents from one process, and from one whose branches are taken for each other
    """
    from diffusers import WanImageToVideoPipeline, WanTransformer3DModel
    from xfuser.model_executor.models.transformers.transformer_wan import xFuserWanTransformer3DWrapper
    from xfuser.model_executor.pipelines.pipeline_wan_i2v import xFuserWanImageToVideoPipeline

    from dbsp_xdit import attach, detach

    parts = _image_to_video_parts(folder)
    settings = {**parts.pop("transformer").config, "in_channels": 36}
    torch.manual_seed(5)
    stock = WanTransformer3DModel.from_config(settings).eval()
    wrapped = xFuserWanTransformer3DWrapper.from_config(settings, attention_kwargs={"thw": None}).eval()
    wrapped.load_state_dict(stock.state_dict())

    pipe = WanImageToVideoPipeline(**parts, transformer=stock)
    swapped = {**config, "mask": {**config["mask"], "function": "tests.support.user_masks:band_of_other_branch"}}

    def alone(settings: dict[str, Any]) -> torch.Tensor:
        single = attach_single_process(stock, settings)
        latents = _image_to_video(pipe)
        single.detach()
        return latents

    results = [kept_from_rank_0(each, functools.partial(alone, each)) for each in (config, swapped)]
    hosted = xFuserWanImageToVideoPipeline(**parts, transformer=wrapped)
    attach(hosted, config)
    out = _image_to_video(hosted)
    detach(hosted)
    return tuple(float((out - expected).abs().max()) for expected in results)  # type: ignore[return-value]


def _image_to_video_parts(folder: str) -> dict[str, Any]:
    from diffusers import WanPipeline

    parts = WanPipeline.from_pretrained(folder, local_files_only=True).components
    return {name: parts[name] for name in ("tokenizer", "text_encoder", "vae", "scheduler", "transformer")}


def _image_to_video(pipe: Any) -> torch.Tensor:
    from PIL import Image

    pipe.set_progress_bar_config(disable=True)
    image = Image.new("RGB", (96, 64), (200, 40, 40))
    latents: torch.Tensor = pipe(
        image=image,
        prompt="a cat runs on the grass",
        negative_prompt="the sea",
        height=64,
        width=96,
        num_frames=9,
        num_inference_steps=2,
        guidance_scale=2.0,
        max_sequence_length=16,  # of 512 tokens, nearly all padding
        generator=torch.Generator().manual_seed(3),
        output_type="latent",
    ).frames
    return latents


def run_data_parallel(rank: int, world: int, case: XditCase, data: int) -> list[tuple[float, float]]:
    """Each group of ranks generates something else, and another number of times."""
    group = rank * data // world
    case = replace(case, seed=1 + group)
    return [differences_of(case, *pass_alone(case.model, case.inputs, case.config)) for _ in range(1 + group)]
