"""A pass under torch.inference_mode() leaves nothing behind that a training pass of the same size cannot use."""

from __future__ import annotations

import pytest

from tests.diffusers.models.inference_cases import train_after_inference
from tests.support.models.tiny_transformers import TINY

USUAL = ("wan", "cogvideox", "hunyuan-image", "framepack", "z-image", "kandinsky5", "qwen", "flux", "ltx2")
"""Models that keep different things; all others run in the long part."""


@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=() if model in USUAL else pytest.mark.long) for model in TINY]
)
def test_model_after_a_pass_in_inference_mode_trains(threads, model):
    for difference, with_gradients in threads(2).run(train_after_inference, model):
        assert difference <= 1e-5
        assert with_gradients > 0
