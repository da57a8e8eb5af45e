"""Requests of different sizes, lengths and guidance denoised together by one of diffusers' Wan pipelines."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dbsp_core.utils.errors import UserError
from dbsp_diffusers.attached import attached_to
from dbsp_diffusers.packed.forward import packed_forward
from dbsp_diffusers.packed_samples import PackedSample

__all__ = ["PackedRequest", "denoise_packed"]


@dataclass(frozen=True, eq=False)
class PackedRequest:
    """One image (`num_frames=1`) or video to be made; the arguments of `WanPipeline.__call__` of the same names."""

    prompt: str | None = None
    negative_prompt: str | None = None
    height: int = 480
    width: int = 832
    num_frames: int = 81
    num_inference_steps: int = 50
    guidance_scale: float = 5.0
    guidance_scale_2: float | None = None
    generator: torch.Generator | None = None
    latents: torch.Tensor | None = field(default=None, repr=False)
    prompt_embeds: torch.Tensor | None = field(default=None, repr=False)
    negative_prompt_embeds: torch.Tensor | None = field(default=None, repr=False)
    max_sequence_length: int = 512


@torch.no_grad()
def denoise_packed(pipe: Any, requests: Sequence[PackedRequest], *, output_type: str = "np") -> list[Any]:
    """Makes what `pipe(**request)` would make of each request, but the transformer is called for all at once.

    Each request keeps its own scheduler, number of steps and guidance; one with fewer steps leaves the others behind.
    Guided requests take a second call a step, as in the pipeline. With db-SP enabled on the pipeline every rank is
    given all requests and returns all results. Prompts are encoded, and latents decoded, one after the other.

    Args:
        pipe: A `WanPipeline` (Wan2.1, Wan2.2 with its two transformers, TI2V from text).
        requests: At least one.
        output_type: As the pipeline's.

    Returns:
        For each request the video, as `pipe(**request).frames[0]` is.

    Raises:
        UserError: For no requests, another pipeline, or a transformer that takes one size at a time.
    """
    if not requests or "WanPipeline" not in (cls.__name__ for cls in type(pipe).__mro__):
        raise UserError(f"denoise_packed runs requests, at least one, of a WanPipeline, not of {type(pipe).__name__}")
    state = attached_to(pipe)
    if state is not None:
        state.generations.agree_on_call(all(request.generator is not None for request in requests))
    runs = [_Run.begin(pipe, request) for request in requests]
    most = max(len(run.timesteps) for run in runs)
    pipe.scheduler.set_timesteps(most, device=pipe._execution_device)  # a new generation, for what counts its steps
    with pipe.progress_bar(total=most) as progress:
        for index, time in enumerate(pipe.scheduler.timesteps.tolist()):
            active = [run for run in runs if index < len(run.timesteps)]
            for model in filter(None, (pipe.transformer, pipe.transformer_2)):
                _step(pipe, model, [run for run in active if run.model(pipe, index) is model], index, time)
            progress.update()
    results = [_decoded(pipe, run.latents, output_type) for run in runs]
    pipe.maybe_free_model_hooks()
    return results


@dataclass(eq=False, repr=False)
class _Run:
    """A request that is being denoised.

    Attributes:
        latents: float32[1, C, F, H, W].
        text, negative: Embeddings [1, n, d]; of a negative prompt only with guidance.
    """

    request: PackedRequest
    scheduler: Any
    latents: torch.Tensor
    text: torch.Tensor
    negative: torch.Tensor | None
    by_token: bool
    """True if the model takes a timestep for each token."""
    times: list[float]
    """The timesteps, on the host."""

    @classmethod
    def begin(cls, pipe: Any, request: PackedRequest) -> _Run:
        pipe.check_inputs(
            request.prompt,
            request.negative_prompt,
            request.height,
            request.width,
            request.prompt_embeds,
            request.negative_prompt_embeds,
            guidance_scale_2=request.guidance_scale_2,
        )
        model = pipe.transformer if pipe.transformer is not None else pipe.transformer_2
        device = pipe._execution_device
        text, negative = pipe.encode_prompt(
            request.prompt,
            request.negative_prompt,
            request.guidance_scale > 1,
            prompt_embeds=request.prompt_embeds,
            negative_prompt_embeds=request.negative_prompt_embeds,
            max_sequence_length=request.max_sequence_length,
            device=device,
        )
        scheduler = copy.deepcopy(pipe.scheduler)
        scheduler.set_timesteps(request.num_inference_steps, device=device)
        scheduler.set_begin_index(0)
        times = scheduler.timesteps.tolist()
        height, width = (
            size // (pipe.vae_scale_factor_spatial * part) * (pipe.vae_scale_factor_spatial * part)
            for size, part in zip((request.height, request.width), model.config.patch_size[1:], strict=True)
        )
        rate, frames = pipe.vae_scale_factor_temporal, request.num_frames
        frames = frames if frames % rate == 1 else max(1, frames // rate * rate + 1)
        latents = pipe.prepare_latents(
            1,
            model.config.in_channels,
            height,
            width,
            frames,
            torch.float32,
            device,
            request.generator,
            request.latents,
        )
        guided = negative.to(model.dtype) if request.guidance_scale > 1 else None
        return cls(request, scheduler, latents, text.to(model.dtype), guided, pipe.config.expand_timesteps, times)

    @property
    def timesteps(self) -> torch.Tensor:
        found: torch.Tensor = self.scheduler.timesteps
        return found

    def _is_late(self, pipe: Any, index: int) -> bool:
        """Returns whether Wan2.2's second transformer takes this step, which has little noise."""
        boundary = pipe.config.boundary_ratio
        return boundary is not None and self.times[index] < boundary * self.scheduler.config.num_train_timesteps

    def model(self, pipe: Any, index: int) -> Any:
        return pipe.transformer_2 if self._is_late(pipe, index) else pipe.transformer

    def guidance(self, pipe: Any, index: int) -> float:
        """The guidance scale of the step."""
        second = self.request.guidance_scale_2
        return self.request.guidance_scale if second is None or not self._is_late(pipe, index) else second

    def sample(self, text: torch.Tensor, index: int, patch: Sequence[int]) -> PackedSample:
        """What the transformer is given at a step, with the embeddings of the prompt or of the negative one."""
        time = self.timesteps[index]
        if self.by_token:
            frames, height, width = self.latents.shape[2:]
            time = time.expand(frames // patch[0] * (height // patch[1]) * (width // patch[2]))
        return PackedSample(self.latents[0].to(text.dtype), time, text[0])


def _step(pipe: Any, model: Any, runs: Sequence[_Run], index: int, time: float) -> None:
    """Takes one step of the runs that this transformer serves; `time` falls from step to step."""
    if not runs:
        return
    patch = model.config.patch_size
    with model.cache_context("cond"):
        found = packed_forward(model, [run.sample(run.text, index, patch) for run in runs], timestep=time)
    guided = [run for run in runs if run.negative is not None]
    without: dict[int, torch.Tensor] = {}
    if guided:
        with model.cache_context("uncond"):
            samples = [run.sample(run.negative, index, patch) for run in guided if run.negative is not None]
            predictions = packed_forward(model, samples, timestep=time)
        without = {id(run): one for run, one in zip(guided, predictions, strict=True)}
    for run, prediction in zip(runs, found, strict=True):
        if id(run) in without:
            other = without[id(run)]
            prediction = other + run.guidance(pipe, index) * (prediction - other)
        step = run.scheduler.step(prediction[None], run.timesteps[index], run.latents, return_dict=False)
        run.latents = step[0]


def _decoded(pipe: Any, latents: torch.Tensor, output_type: str) -> Any:
    """Decodes the last latents as the pipeline does."""
    if output_type == "latent":
        return latents[0]
    vae = pipe.vae
    latents = latents.to(vae.device, vae.dtype)
    mean, std = (
        torch.tensor(each, device="cpu").view(1, -1, 1, 1, 1).to(latents)
        for each in (vae.config.latents_mean, vae.config.latents_std)
    )
    video = vae.decode(latents / (1.0 / std) + mean, return_dict=False)[0]
    return pipe.video_processor.postprocess_video(video, output_type=output_type)[0]
