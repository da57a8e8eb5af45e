"""SpargeAttn's block predictor written from the paper, token by token and pair by pair, in float64 numpy."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dbsp_core import BlockGrid
from tests.support.oracle import position_in_order


@dataclass(frozen=True)
class Margins:
    """Distances of decisions from their thresholds: [H, nq, nk] and [H, n]."""

    chosen: np.ndarray
    similar_q: np.ndarray
    similar_k: np.ndarray


def predict(
    q: np.ndarray,
    k: np.ndarray,
    grid: BlockGrid,
    *,
    cdf=None,
    topk=None,
    similarity=0.3,
    attention_sink=False,
    dense_text=True,
):
    """Returns (bool[H, nq, nk], margins) for q, k: float[H, N, D] in token order."""
    heads = len(q)
    token_permutation = np.argsort(position_in_order(grid, 0).numpy())
    bits = np.zeros((heads, grid.nq, grid.nk), dtype=bool)
    margins = Margins(
        np.full(bits.shape, np.inf), np.full((heads, grid.nq), np.inf), np.full((heads, grid.nk), np.inf)
    )
    for head in range(heads):
        mean_q, similar_q = pooled(q[head][token_permutation], grid.q_axis)
        mean_k, similar_k = pooled(k[head][token_permutation], grid.k_axis)
        margins.similar_q[head], margins.similar_k[head] = (
            np.abs(similar_q - similarity),
            np.abs(similar_k - similarity),
        )
        for i in range(grid.nq):
            scores = np.array([mean_q[i] @ mean_k[j] for j in range(grid.nk)]) * q.shape[-1] ** -0.5
            weights = np.where(similar_k > similarity, np.exp(scores - scores.max()), 0.0)
            chance = weights / max(weights.sum(), 1e-300)
            total = 0.0
            for rank, j in enumerate(np.argsort(-chance, kind="stable")):
                total += chance[j]
                if topk is not None:
                    take = rank < max(1, int(topk * grid.nk + 1e-9))
                else:
                    take = rank == 0 or cdf == 1 or total <= cdf
                    margins.chosen[head, i, j] = abs(total - cdf)
                bits[head, i, j] = take or similar_q[i] <= similarity or similar_k[j] <= similarity
    if attention_sink:
        bits[:, :, 0] = True
    if dense_text in (True, "rows"):
        bits[:, grid.q_axis.starts < grid.text_tokens] = True
    if dense_text in (True, "columns"):
        bits[:, :, grid.k_axis.starts < grid.text_tokens] = True
    return bits, margins


def pooled(tokens: np.ndarray, axis) -> tuple[np.ndarray, np.ndarray]:
    """Returns float32 means as float64 [n, D], and mean cosines of all pairs of each block's tokens [n]."""
    means, similar = [], []
    for start, length in zip(axis.starts, axis.lengths, strict=True):
        block = tokens[start : start + length].astype(np.float64)
        means.append(block.mean(axis=0))
        norms = np.linalg.norm(block, axis=1)
        cosines = [
            a @ b / (x * y) if x and y else 0.0
            for a, x in zip(block, norms, strict=True)
            for b, y in zip(block, norms, strict=True)
        ]
        similar.append(np.mean(cosines))
    return np.array(means, dtype=np.float32).astype(np.float64), np.array(similar)
