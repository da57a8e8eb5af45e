"""Inputs of kernels' backward, and gradients of attention written out in float64. No test library needed here."""

from __future__ import annotations

import torch

from dbsp_kernels import BackwardInputs, KernelInputs
from tests.kernels.packed_inputs import Packed, full_counts


def transposed(p: Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows of each block, and how many they are, found row by row."""
    readers = [[r for r, n in enumerate(p.kv_count.tolist()) if b in p.kv_index[r, :n]] for b in range(len(p.k))]
    rows = torch.full((len(p.k), max(1, len(p.q))), -3, dtype=torch.int32)
    for block, of_block in enumerate(readers):
        rows[block, : len(of_block)] = torch.tensor(of_block, dtype=torch.int32)
    return rows, torch.tensor([len(r) for r in readers], dtype=torch.int32)


def turned(count: int) -> torch.Tensor:
    """Returns int32[count], an order in which rows or blocks may start."""
    return torch.arange(count, dtype=torch.int32).flip(0)


def expected_and_inputs(
    p: Packed, others: Packed | None = None, device: str = "cpu"
) -> tuple[list[torch.Tensor], BackwardInputs]:
    """Gradients in float64, and what a kernel is given. others: keys of another call, which the softmax spans too"""
    scale = p.q.shape[-1] ** -0.5
    leaves = [t.double().requires_grad_(True) for t in (p.q, p.k, p.v)]
    scores, values = [], []
    for one, k, v in [(p, leaves[1], leaves[2])] + (
        [(others, others.k.double(), others.v.double())] if others else []
    ):
        allowed = torch.zeros(len(p.q), len(one.k), one.k.shape[1], dtype=torch.bool)
        for row, count in enumerate(one.kv_count.tolist()):
            for block in one.kv_index[row, :count].tolist():
                allowed[row, block, : one.kv_len[block]] = True
        found = torch.einsum("rqd,ckd->rqck", leaves[0], k) * scale
        scores.append(found.masked_fill(~allowed[:, None], -torch.inf).flatten(2))
        values.append(v.flatten(0, 1))
    together = torch.cat(scores, dim=-1)
    lse = together.detach().logsumexp(dim=-1)
    empty = torch.isneginf(lse)
    weights = torch.softmax(together.masked_fill(empty[..., None], 0.0), dim=-1).masked_fill(empty[..., None], 0.0)
    out = weights @ torch.cat(values)
    dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(p.q.dtype)
    (out * dout.double()).sum().backward()
    wide = torch.promote_types(p.q.dtype, torch.float32)
    given = KernelInputs(*vars(p.to(device)).values(), scale, full_counts(p).to(device), turned(len(p.q)).to(device))
    rows, count = (one.to(device) for one in transposed(p))
    parts = (one.to(device) for one in (dout, out.detach().to(p.q.dtype), lse.to(wide)))
    inputs = BackwardInputs(given, *parts, lambda: (rows, count, turned(len(count)).to(device)))
    return [t.grad for t in leaves], inputs  # type: ignore[misc]
