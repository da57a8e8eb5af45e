"""Sol-Attn's routing against its definition written out."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch

from dbsp_core import BlockGrid
from dbsp_core.sources import SolSource
from tests.core.sources.predicted.sparge_cases import SpargeCase, alone, pooled
from tests.support.oracle import position_in_order


def predict(
    q: np.ndarray, k: np.ndarray, grid: BlockGrid, *, tau=1.0, thresh_type="diag", attention_sink=False
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (bool[H, nq, nk], how far scores are from thresholds) for q, k: float[H, N, D] in token order."""
    token_permutation = np.argsort(position_in_order(grid, 0).numpy())
    bits = np.zeros((len(q), grid.nq, grid.nk), dtype=bool)
    margins = np.zeros(bits.shape)
    to_base_2 = q.shape[-1] ** -0.5 * math.log2(math.e)
    for head in range(len(q)):
        mean_q, _ = pooled(q[head][token_permutation], grid.q_axis)
        mean_k, _ = pooled(k[head][token_permutation], grid.k_axis)
        for i, query in enumerate(mean_q):
            scores = np.array([query @ key for key in mean_k]) * to_base_2
            if thresh_type == "exact":
                variance = np.mean((scores - scores.mean()) ** 2)
            else:
                variance = sum(query**2 * mean_k.var(axis=0)) * to_base_2**2
            margins[head, i] = scores - scores.mean() - tau * math.sqrt(variance + 1e-6)
            bits[head, i] = margins[head, i] > 0
            for j in range(grid.nk):
                own = range(grid.q_axis.starts[i], grid.q_axis.starts[i] + grid.q_axis.lengths[i])
                around = {block + step for block in grid.k_axis.block_of[list(own)] for step in (-1, 0, 1)}
                bits[head, i, j] |= j in around
    bits[:, :, 0] |= attention_sink
    bits[:, grid.q_axis.starts < grid.text_tokens] = True
    bits[:, :, grid.k_axis.starts < grid.text_tokens] = True
    return bits, np.abs(margins)


SolCase = partial(SpargeCase, kind=SolSource)
CASES = {
    "diag": SolCase(settings={}),
    "exact": SolCase(settings={"thresh_type": "exact", "tau": 0.5}),
    "text, batch of two": SolCase(text_tokens=21, batch=2, thw=(4, 5, 11), settings={"tau": 0.3}),
    "sink, small blocks": SolCase(settings={"tau": 1.2, "attention_sink": True, "block_q": 8, "block_k": 24}),
    "bfloat16": SolCase(dtype=torch.bfloat16, settings={"block_q": 16, "thresh_type": "exact"}),
    "tiles": SolCase(settings={"tau": 0.8, "token_order": "tile:2x4x4"}, thw=(4, 8, 9), heads=2),
    "below the mean": SolCase(settings={"tau": -0.7}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_mask_equals_the_definition_written_out(case):
    mask = alone(case)
    known = ("tau", "thresh_type", "attention_sink")
    settings = {key: value for key, value in case.settings.items() if key in known}
    expected, margins = predict(*case.by_head(), mask.grid, **settings)
    different = mask.bits.numpy() != expected
    assert not (different & (margins > 1e-5)).any()  # pooled numbers are rounded to 22 bits
    assert different.mean() < 0.001
    assert 0.1 < mask.density < 0.9
