"""A pass under torch.inference_mode() leaves nothing behind that a training pass of the same size cannot use."""

from __future__ import annotations

import pytest

from tests.diffusers.models.inference_cases import train_after_inference
from tests.support.models.tiny_transformers import TINY


@pytest.mark.parametrize("model", TINY)
def test_model_after_a_pass_in_inference_mode_trains(threads, model):
    for difference, with_gradients in threads(2).run(train_after_inference, model):
        assert difference <= 1e-5
        assert with_gradients > 0
