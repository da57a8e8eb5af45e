"""What the workers run: whole pipelines of Wan's family, Wan2.2's two transformers among them, against one process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dbsp_diffusers
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config import DbspConfig
from dbsp_core.masks.steps import StepClock
from dbsp_diffusers.models.transformers import transformers_of
from dbsp_diffusers.sharding.generations import Generations
from tests.support.models.tiny_pipelines import difference, load
from tests.support.models.tiny_transformers import LATENTS, make_tiny_transformer
from tests.support.references import by_first_rank, kept_from_rank_0
from tests.support.single_process import attach_single_process

SIZE = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 4, "guidance_scale": 2.0}
BRIEF = {"num_inference_steps": 2, "max_sequence_length": 16, "num_frames": 5}
"""Of Wan2.2's two transformers, each has one of the steps."""
MASK = {"source": "synthetic", "density": 0.4, "block_q": 16, "block_k": 16}


def _image(seed: int = 0, height: int = 64, width: int = 96) -> Any:
    from PIL import Image

    return Image.fromarray((np.random.RandomState(seed).rand(height, width, 3) * 255).astype("uint8"))


def make_pipe(kind: str, folder: str) -> tuple[Any, dict[str, Any]]:
    """(a tiny pipeline, the arguments of its calls next to SIZE). folder: of a tiny Wan2.1"""
    import diffusers

    parts = dict(load("wan", folder).components)
    image: dict[str, Any] = {"image": _image()}
    if kind == "a14b":
        parts |= {"transformer_2": make_tiny_transformer("wan", seed=7, **LATENTS), "boundary_ratio": 0.875}
        parts["transformer"] = make_tiny_transformer("wan", seed=6, **LATENTS)
        return diffusers.WanPipeline(**parts), {}
    if kind == "ti2v":
        return diffusers.WanPipeline(**parts | {"expand_timesteps": True}), {}
    parts.pop("transformer_2", None)
    if kind.startswith("vace"):
        transformer = make_tiny_transformer("vace", vace_in_channels=96, **LATENTS)
        pipe = diffusers.WanVACEPipeline(**parts | {"transformer": transformer})
        video: dict[str, Any] = {"video": [_image(seed) for seed in range(5)]}
        return pipe, video | ({"reference_images": [[_image(9)]]} if kind == "vace with references" else {})
    if kind == "ti2v of an image":
        return diffusers.WanImageToVideoPipeline(**parts | {"expand_timesteps": True}), image
    sizes = LATENTS | {"in_channels": 36}
    if kind == "i2v of Wan2.2":
        return diffusers.WanImageToVideoPipeline(
            **parts | {"transformer": make_tiny_transformer("wan", **sizes)}
        ), image
    from transformers import CLIPImageProcessorPil, CLIPVisionConfig, CLIPVisionModel

    with torch.random.fork_rng():
        torch.manual_seed(5)
        encoder = CLIPVisionModel(
            CLIPVisionConfig(
                hidden_size=20,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=32,
                image_size=32,
                patch_size=8,
            )
        ).eval()
    processor = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    parts |= {"transformer": make_tiny_transformer("wan-i2v", **sizes), "image_encoder": encoder}
    return diffusers.WanImageToVideoPipeline(**parts, image_processor=processor), image


def latents(pipe: Any, options: dict[str, Any], **more: Any) -> torch.Tensor:
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(3)
    return pipe(prompt="a red ball", generator=generator, output_type="latent", **SIZE | options | more).frames


def alone(pipe: Any, config: dict[str, Any], options: dict[str, Any], **more: Any) -> torch.Tensor:
    """What one process makes."""

    transformers, whole = transformers_of(pipe), DbspConfig.load(config)
    generations = Generations(pipe, SequenceGroup(0, 1))
    clock = StepClock(generations.progress, shared=len(transformers) > 1)
    singles = [
        attach_single_process(part, whole.for_transformer(name), generations.steps, clock)
        for name, part in transformers.items()
    ]
    try:
        return latents(pipe, options, **more)
    finally:
        for single in singles:
            single.detach()


@by_first_rank
def one_process(kind: str, folder: str, config: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents with dense attention, and with a configuration's."""
    pipe, options = make_pipe(kind, folder)
    return latents(pipe, options, **BRIEF), alone(pipe, json.loads(config), options, **BRIEF)


def run_kind(rank: int, world: int, kind: str, folder: str, config: dict[str, Any]) -> tuple[float, float, float]:
    """(difference of the latents from one process, from dense attention, of dense ones before and after)."""
    dense, expected = one_process(kind, folder, json.dumps(config))
    pipe, options = make_pipe(kind, folder)
    dbsp_diffusers.enable(pipe, config)
    out = latents(pipe, options, **BRIEF)
    dbsp_diffusers.disable(pipe)
    assert dbsp_diffusers.sessions_of(pipe) == {}
    return difference(out, expected), difference(out, dense), difference(latents(pipe, options, **BRIEF), dense)


def run_both(rank: int, world: int, folder: str, where: str) -> tuple[float, dict[str, Any], list[str]]:
    """Wan2.2's two transformers, with masks and recordings of each, twice.

    returns: difference from one process, the report of the second call, the folders of recordings
    """
    pipe, _ = make_pipe("a14b", folder)
    options = {"max_sequence_length": 16, "num_frames": 5}
    config: dict[str, Any] = {"mask": MASK, "strategy": "U1R2", "dense_schedule": {"first_steps": 2, "last_steps": 1}}
    config |= {"transformer_2": {"mask": MASK | {"seed": 9}}}
    expected = kept_from_rank_0("both", lambda: alone(pipe, config, options))
    own = replace(DbspConfig.load(config | {"report": f"{where}/report"}), record=f"{where}/masks")
    dbsp_diffusers.enable(pipe, own)
    sessions = dbsp_diffusers.sessions_of(pipe)
    assert list(sessions) == ["transformer", "transformer_2"]
    assert dbsp_diffusers.session_of(pipe.transformer_2) is sessions["transformer_2"]
    assert sessions["transformer_2"].config.mask == replace(sessions["transformer"].config.mask, seed=9)
    out = [latents(pipe, options) for _ in range(2)]
    report = json.loads(Path(where, "report", "report.json").read_text()) if rank == 0 else {}
    dbsp_diffusers.disable(pipe.transformer_2)  # and with it the first
    assert dbsp_diffusers.session_of(pipe) is None
    folders = sorted(path.name for path in Path(where, "masks").iterdir()) if rank == 0 else []
    return max(difference(one, expected) for one in out), report, folders
