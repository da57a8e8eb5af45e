"""Sol-Attn's routing written from its definition, block by block, in float64 numpy; scores in base 2, as theirs."""

from __future__ import annotations

import math

import numpy as np

from dbsp_core import BlockGrid
from tests.core.sources.predicted.sparge_reference import pooled
from tests.support.oracle import slot_in_order


def predict(
    q: np.ndarray, k: np.ndarray, grid: BlockGrid, *, tau=1.0, thresh_type="diag", attention_sink=False
) -> tuple[np.ndarray, np.ndarray]:
    """q, k: float[H, N, D] in canonical order. Returns (bool[H, nq, nk], how far scores are from thresholds)."""
    token_permutation = np.argsort(slot_in_order(grid, 0).numpy())
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
