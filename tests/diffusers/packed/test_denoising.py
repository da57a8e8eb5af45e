"""examples/denoise_packed.py: requests denoised together give what the pipeline makes of each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dbsp_diffusers
from examples.denoise_packed import Request, denoise_packed
from tests.support.models.tiny_pipelines import make_wan22
from tests.support.outcomes import assert_near

REQUESTS: tuple[dict[str, Any], ...] = (
    {"prompt": "a red ball", "height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 3},
    {"prompt": "a small house by the sea", "height": 48, "width": 64, "num_frames": 1, "num_inference_steps": 2},
    {"prompt": "rain", "height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 1},
)
GUIDANCE = (2.0, 1.0, 3.0)
OPTIONS = [request | {"guidance_scale": scale} for request, scale in zip(REQUESTS, GUIDANCE, strict=True)]
MASK = {"source": "synthetic", "density": 0.4, "block_q": 16, "block_k": 16}
CONFIG = {"mask": MASK, "dense_schedule": {"first_steps": 1}}


def denoised(rank: int, world: int, kind: str, folder: str, output_type: str, bags: str | None = None) -> None:
    """Compares requests denoised together with what the pipeline makes of each, under the same masks."""
    pipe = make_wan22(kind, folder)
    pipe.set_progress_bar_config(disable=True)
    dbsp_diffusers.enable(pipe, CONFIG | {"bags": bags})
    expected = [
        pipe(output_type=output_type, generator=torch.Generator().manual_seed(seed), **options).frames[0]
        for seed, options in enumerate(OPTIONS)
    ]
    requests = [Request(seed=seed, **options) for seed, options in enumerate(OPTIONS)]
    found = denoise_packed(pipe, requests, output_type=output_type)
    dbsp_diffusers.disable(pipe)
    assert [one.shape for one in found] == [one.shape for one in expected]
    assert_near(map(torch.as_tensor, found), map(torch.as_tensor, expected))


@pytest.mark.parametrize(
    ("world", "kind", "output_type", "bags"),
    [
        (1, "a14b", "np", None),
        pytest.param(2, "ti2v", "latent", None, marks=pytest.mark.long),
        pytest.param(4, "ti2v", "latent", "g1n2+g2n1", marks=pytest.mark.long),
    ],
)
def test_requests_together_give_what_the_pipeline_gives_for_each(pool, folder, world, kind, output_type, bags):
    pool(world).run(denoised, kind, folder, output_type, bags)
