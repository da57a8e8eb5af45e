"""Denoises requests of several sizes together with one of diffusers' Wan pipelines, for packed.py."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dbsp_diffusers import PackedSample, packed_forward


@dataclass(frozen=True)
class Request:
    """One image (`num_frames=1`) or video: arguments of `WanPipeline.__call__`, with valid sizes."""

    prompt: str
    seed: int
    negative_prompt: str | None = None
    height: int = 480
    width: int = 832
    num_frames: int = 81
    num_inference_steps: int = 50
    guidance_scale: float = 5.0
    guidance_scale_2: float | None = None


@torch.no_grad()
def denoise_packed(pipe: Any, requests: Sequence[Request], *, output_type: str = "np") -> list[Any]:
    """Generates what `pipe(**request)` generates for each request, with one call of the transformer for all of them.

    Each request keeps its own scheduler, number of steps and guidance. Prompts are encoded, and latents decoded, one
    after the other. db-SP must be enabled on the pipeline; every rank is given all requests and returns all results.

    Args:
        pipe: A `WanPipeline` (Wan2.1, Wan2.2 with its two transformers, TI2V from text).
        requests: At least one; the same on all ranks.
        output_type: As the pipeline's.

    Returns:
        For each request the video, as `pipe(**request).frames[0]` is.
    """
    runs = [_Run(pipe, request) for request in requests]
    most = max(len(run.times) for run in runs)
    pipe.scheduler.set_timesteps(most, device=pipe._execution_device)  # starts a new generation
    for index, time in enumerate(pipe.scheduler.timesteps.tolist()):
        active = [run for run in runs if index < len(run.times)]
        for model in filter(None, (pipe.transformer, pipe.transformer_2)):
            _step(model, [run for run in active if run.model(index) is model], index, time)
    results = [_decoded(pipe, run.latents, output_type) for run in runs]
    pipe.maybe_free_model_hooks()
    return results


class _Run:
    """A request that is being denoised: its scheduler, its latents [1, C, F, H, W], and embeddings [1, n, d]."""

    def __init__(self, pipe: Any, request: Request) -> None:
        self.pipe, self.request = pipe, request
        model = pipe.transformer if pipe.transformer is not None else pipe.transformer_2
        device = pipe._execution_device
        embeddings = pipe.encode_prompt(
            request.prompt, request.negative_prompt, request.guidance_scale > 1, max_sequence_length=512, device=device
        )
        self.text, self.negative = (one if one is None else one.to(model.dtype) for one in embeddings)
        self.scheduler = copy.deepcopy(pipe.scheduler)
        self.scheduler.set_timesteps(request.num_inference_steps, device=device)
        self.scheduler.set_begin_index(0)
        self.times = self.scheduler.timesteps.tolist()
        # All ranks start from the same noise.
        noise = torch.Generator().manual_seed(request.seed)
        size = request.height, request.width, request.num_frames
        self.latents = pipe.prepare_latents(1, model.config.in_channels, *size, torch.float32, device, noise)

    def _is_late(self, index: int) -> bool:
        """Returns whether Wan2.2's second transformer takes this step, which has little noise."""
        boundary = self.pipe.config.boundary_ratio
        return boundary is not None and self.times[index] < boundary * self.scheduler.config.num_train_timesteps

    def model(self, index: int) -> Any:
        """Returns the transformer of a step."""
        return self.pipe.transformer_2 if self._is_late(index) else self.pipe.transformer

    def guidance(self, index: int) -> float:
        """Returns the guidance scale of a step."""
        second = self.request.guidance_scale_2
        return self.request.guidance_scale if second is None or not self._is_late(index) else second

    def sample(self, text: torch.Tensor, index: int) -> PackedSample:
        """Returns what the transformer is given at a step, with the embeddings of one of the two prompts."""
        time = self.scheduler.timesteps[index]
        if self.pipe.config.expand_timesteps:  # TI2V takes a timestep for each token
            patch = self.model(index).config.patch_size
            frames, height, width = self.latents.shape[2:]
            time = time.expand(frames // patch[0] * (height // patch[1]) * (width // patch[2]))
        return PackedSample(self.latents[0].to(text.dtype), time, text[0])


def _step(model: Any, runs: Sequence[_Run], index: int, time: float) -> None:
    """Takes one step of the runs that are at this transformer; `time` falls from step to step."""
    if not runs:
        return
    with model.cache_context("cond"):
        found = packed_forward(model, [run.sample(run.text, index) for run in runs], timestep=time)
    guided = [run for run in runs if run.negative is not None]
    without = {}
    if guided:
        with model.cache_context("uncond"):
            predictions = packed_forward(model, [run.sample(run.negative, index) for run in guided], timestep=time)
        without = dict(zip(guided, predictions, strict=True))
    for run, prediction in zip(runs, found, strict=True):
        if run in without:
            prediction = without[run] + run.guidance(index) * (prediction - without[run])
        run.latents = run.scheduler.step(prediction[None], run.scheduler.timesteps[index], run.latents)[0]


def _decoded(pipe: Any, latents: torch.Tensor, output_type: str) -> Any:
    """Decodes the last latents as the pipeline does."""
    if output_type == "latent":
        return latents[0]
    vae = pipe.vae
    latents = latents.to(vae.device, vae.dtype)
    mean, std = (
        torch.tensor(each).view(1, -1, 1, 1, 1).to(latents)
        for each in (vae.config.latents_mean, vae.config.latents_std)
    )
    video = vae.decode(latents / (1.0 / std) + mean, return_dict=False)[0]
    return pipe.video_processor.postprocess_video(video, output_type=output_type)[0]
