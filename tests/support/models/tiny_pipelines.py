"""Whole tiny pipelines from disk: the call that tests make of them, in one process or parallel, and what it leaves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dbsp_cli.tiny_models import make_tiny
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config import DbspConfig
from dbsp_core.masks.steps import StepClock
from dbsp_diffusers.models.transformers import transformers_of
from dbsp_diffusers.patching import PatchSet
from dbsp_diffusers.sharding.generations import Generations
from tests.support.models.tiny_transformers import LATENTS, make_tiny_transformer
from tests.support.single_process import attach_single_process

# Guidance multiplies rounding by its scale: at 6, latents of 11.5 differ by 1.1e-5 (by nothing in float64).
SIZE = {"guidance_scale": 2.0, "height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 2}
"""Wan: 3·4·6 = 72 tokens, which 4 ranks divide and 5 don't; CogVideoX1.5: 226 of text and 2·4·6 of video."""


def load(model: str, folder: str) -> Any:
    """Returns a pipeline of a class of its own: para-attn changes classes and does not undo it."""
    import diffusers

    base = {"wan": diffusers.WanPipeline, "cogvideox": diffusers.CogVideoXPipeline}[model]
    pipe = type(base.__name__ + "UnderTest", (base,), {}).from_pretrained(folder, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def latents(pipe: Any, prompt: str | list[str] = "the sea at dusk", seed: int | None = 3, **options: Any) -> Any:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    text = {"max_sequence_length": 16} if "Wan" in type(pipe).__name__ else {}  # of 512 tokens, nearly all padding
    return pipe(prompt=prompt, generator=generator, output_type="latent", **text | SIZE | options).frames


def alone(pipe: Any, config: Any, **options: Any) -> torch.Tensor:
    """Returns the latents of one process."""
    attached = attach_pipeline(pipe, config)
    try:
        return latents(pipe, **options)
    finally:
        for single in attached:
            single.detach()


def attach_pipeline(pipe: Any, config: Any) -> list[PatchSet]:
    """Makes a pipeline's transformers block-sparse in this process; several take turns, by one counter of steps."""
    transformers, whole = transformers_of(pipe), DbspConfig.load(config)
    generations = Generations(pipe, SequenceGroup(0, 1))
    clock = StepClock(generations.progress, shared=len(transformers) > 1)
    return [
        attach_single_process(part, whole.for_transformer(name), generations.steps, clock)
        for name, part in transformers.items()
    ]


def small_wan(folder: Path, **sizes: Any) -> str:
    """Writes a tiny Wan2.1 with the transformer of tests, of half as many layers and heads as the command's."""
    made = make_tiny("wan", folder)
    make_tiny_transformer("wan", **LATENTS | sizes).save_pretrained(made / "transformer")
    return str(made)


def make_wan22(kind: str, folder: str) -> Any:
    """Returns a tiny pipeline of Wan2.2: "a14b", with two transformers, or "ti2v". folder: of a tiny Wan2.1"""
    import diffusers

    parts = dict(load("wan", folder).components)
    if kind == "ti2v":
        return diffusers.WanPipeline(**parts | {"expand_timesteps": True})
    first, second = (make_tiny_transformer("wan", seed=seed, **LATENTS) for seed in (6, 7))
    return diffusers.WanPipeline(**parts | {"transformer": first, "transformer_2": second, "boundary_ratio": 0.875})


def state_of(pipe: Any) -> list[Any]:
    """Classes, attributes and hooks of a pipeline, to compare before and after."""
    return [type(pipe), dict(vars(type(pipe))), sorted(vars(pipe)), *fingerprint(pipe.transformer)]


def fingerprint(module: torch.nn.Module) -> list[Any]:
    """Classes, instance attributes and hooks of a module and all in it, to compare before and after."""
    state = []
    for name, part in module.named_modules():
        hooks = [len(part._forward_hooks), len(part._forward_pre_hooks)]
        processor = getattr(part, "processor", None)
        state.append((name, type(part), sorted(vars(part)), hooks, sorted(vars(processor)) if processor else None))
    return state
