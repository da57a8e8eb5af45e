"""What the workers run: requests of several sizes through one pipeline, against one by one."""

from __future__ import annotations

from typing import Any

import torch

import dbsp_diffusers
from dbsp_diffusers import PackedRequest, denoise_packed
from tests.diffusers.models.wan22_cases import MASK, make_pipe

REQUESTS: tuple[dict[str, Any], ...] = (
    {"prompt": "a red ball", "height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 3},
    {"prompt": "a small house by the sea", "height": 48, "width": 64, "num_frames": 1, "num_inference_steps": 2},
    {"prompt": "rain", "height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 1},
)
GUIDANCE = (2.0, 1.0, 3.0)
CONFIG = {"mask": MASK, "dense_schedule": {"first_steps": 1}}


def _options() -> list[dict[str, Any]]:
    return [
        request | {"guidance_scale": scale, "generator": torch.Generator().manual_seed(seed)}
        for seed, (request, scale) in enumerate(zip(REQUESTS, GUIDANCE, strict=True))
    ]


def _difference(found: list[Any], expected: list[Any]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float((torch.as_tensor(a) - torch.as_tensor(b)).abs().max()) for a, b in pairs)


def denoised(
    rank: int, world: int, kind: str, folder: str, enabled: bool, output_type: str, bags: str | None = None
) -> float:
    """The largest difference of all values from what the pipeline makes of each request, under the same masks."""
    pipe, _ = make_pipe(kind, folder)
    pipe.set_progress_bar_config(disable=True)
    if enabled:
        dbsp_diffusers.enable(pipe, CONFIG | {"bags": bags})
    expected = [pipe(output_type=output_type, **options).frames[0] for options in _options()]
    found = denoise_packed(pipe, [PackedRequest(**options) for options in _options()], output_type=output_type)
    dbsp_diffusers.disable(pipe)
    assert [one.shape for one in found] == [one.shape for one in expected]
    return _difference(found, expected)


def own_noise(rank: int, world: int, folder: str) -> torch.Tensor:
    """Without a generator, all ranks draw the same noise."""
    pipe, _ = make_pipe("a14b", folder)
    pipe.set_progress_bar_config(disable=True)
    torch.manual_seed(rank)
    dbsp_diffusers.enable(pipe, {"mask": {"source": "dense"}})
    (latents,) = denoise_packed(pipe, [PackedRequest(**REQUESTS[1])], output_type="latent")
    dbsp_diffusers.disable(pipe)
    return latents
