"""What the workers run: requests of several sizes through one pipeline, against one by one."""

from __future__ import annotations

from typing import Any

import torch

import dbsp_diffusers
from examples.denoise_packed import Request, denoise_packed
from tests.diffusers.models.wan22_cases import MASK, make_pipe

REQUESTS: tuple[dict[str, Any], ...] = (
    {"prompt": "a red ball", "height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 3},
    {"prompt": "a small house by the sea", "height": 48, "width": 64, "num_frames": 1, "num_inference_steps": 2},
    {"prompt": "rain", "height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 1},
)
GUIDANCE = (2.0, 1.0, 3.0)
OPTIONS = [request | {"guidance_scale": scale} for request, scale in zip(REQUESTS, GUIDANCE, strict=True)]
CONFIG = {"mask": MASK, "dense_schedule": {"first_steps": 1}}


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
    expected = [
        pipe(output_type=output_type, generator=torch.Generator().manual_seed(seed), **options).frames[0]
        for seed, options in enumerate(OPTIONS)
    ]
    requests = [Request(seed=seed, **options) for seed, options in enumerate(OPTIONS)]
    found = denoise_packed(pipe, requests, output_type=output_type)
    dbsp_diffusers.disable(pipe)
    assert [one.shape for one in found] == [one.shape for one in expected]
    return _difference(found, expected)
