"""The predictor's bits are those of its first, plainest form: all tokens at once, head by head, by stable sorting."""

from __future__ import annotations

import itertools

import pytest
import torch

from dbsp_core.comm import block_pooling
from dbsp_core.config import DbspConfig
from dbsp_core.sources import LocalQK, sol, sparge, vsa
from tests.core.sources.predicted.sparge_cases import SpargeCase
from tests.support.interpreter import interpreted

GPU_FUNCTIONS = ("sum_tokens", "pool_rows", "pooled_scores", "select_blocks")


@pytest.mark.parametrize(
    "settings",
    [
        {"source": "sparge", "topk": 0.3, "similarity": 0.2, "attention_sink": True},
        {"source": "sol", "tau": 0.5, "thresh_type": "exact"},
        {"source": "vsa", "sparsity": 0.7, "tile": [2, 2, 4]},
        {"source": "nabla", "cdf": 0.6, "window": [1, 3, 3]},
    ],
    ids=lambda settings: settings["source"],
)
def test_kernels_for_gpus_predict_identical_bits(settings, monkeypatch):
    """Runs in Triton's interpreter if there is no GPU."""
    pytest.importorskip("triton")
    from dbsp_kernels.triton import prediction

    case = SpargeCase(thw=(2, 7, 10), text_tokens=5, heads=2, batch=2)
    source = DbspConfig.load({"mask": settings | {"block_q": 16, "block_k": 16}}).mask
    expected = source.mask(case.request, LocalQK.alone(*case.tensors()))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for module, name in itertools.product((block_pooling, sol, sparge, vsa), GPU_FUNCTIONS):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, getattr(prediction, f"{name}_triton"))
    with interpreted():
        found = source.mask(case.request, LocalQK.alone(*(one.to(device) for one in case.tensors())))
    assert found.fingerprint == expected.fingerprint
    assert expected.density < 0.9
