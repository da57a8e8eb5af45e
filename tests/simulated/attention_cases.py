"""What ranks on simulated GPUs run: one attention, forward and backward, against the oracle of one process."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from dbsp_core import BlockGrid, BlockMask, SequenceGroup, SequenceLayout, dual_balanced_attention
from dbsp_kernels import dense
from tests.gpu_node.faults import recorded
from tests.kernels.packed_inputs import int8_and_back
from tests.support.oracle import dense_attention
from tests.support.thread_ranks import once


@dataclass(frozen=True)
class AttentionCase:
    """One attention. dense_heads: heads whose every block is active; sabotage: a negative control's fault."""

    strategy: str
    planner: str = "dbsp"
    keys: str = "all"
    heads: int = 3
    tokens: int = 60
    text_tokens: int = 0
    batch: int = 1
    head_dim: int = 16
    dense_heads: int = 0
    dtype: torch.dtype = torch.float32
    kernel: str = "auto"
    gradients: bool = False
    sabotage: str | None = None

    @property
    def grid(self) -> BlockGrid:
        return BlockGrid(self.tokens, self.text_tokens, 16, 8)


def largest_errors(rank: int, world: int, case: AttentionCase) -> list[float]:
    """Returns the largest error of this rank's output, and of its gradients relative to the largest one."""
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    mask, full, weight, expected = once(lambda: _whole(case))
    layout = SequenceLayout.contiguous(case.tokens, world)
    mine, slots = (torch.from_numpy(one) for one in layout.tokens_at(rank))
    local = []
    for whole in full:
        shard = torch.zeros(case.batch, case.heads, layout.shard, case.head_dim, dtype=case.dtype)
        shard[:, :, slots] = whole.detach()[:, :, mine].to(case.dtype)
        local.append(shard.to(device).requires_grad_(case.gradients))
    if case.sabotage == "another head":
        local[1] = local[1].roll(1, dims=1)
    group = SequenceGroup.from_group()
    out = dual_balanced_attention(
        *local,
        mask,
        case.strategy,
        planner=case.planner,
        layout=layout,
        group=group,
        keys=case.keys,
        kernel=case.kernel,
    )
    assert (out.device, out.dtype) == (device, case.dtype)
    errors = [float((out.detach().cpu()[:, :, slots].double() - expected[0][:, :, mine]).abs().max())]
    if case.gradients:
        shard = torch.zeros(case.batch, case.heads, layout.shard, case.head_dim, dtype=case.dtype)
        shard[:, :, slots] = weight[:, :, mine].to(case.dtype)
        (out * shard.to(device)).sum().backward()
        for one, right in zip(local, expected[1:], strict=True):
            assert one.grad is not None
            assert one.grad.device == device
            apart = one.grad.cpu()[:, :, slots].double() - right[:, :, mine]
            errors.append(float(apart.abs().max() / right.abs().max()))
    return errors


def fused_operators(rank: int, world: int, case: AttentionCase) -> tuple[float, set[str]]:
    """Returns the largest error, and torch's fused attentions that ran."""
    dense._operator.cache_clear()  # a test before may have run on GPUs of another architecture
    worst = max(largest_errors(rank, world, case))
    return worst, {name for name in recorded.operators if name.startswith("_scaled_dot_product")}


def _whole(case: AttentionCase) -> tuple[BlockMask, list[torch.Tensor], torch.Tensor, list[torch.Tensor]]:
    """Returns the mask, q, k and v of all tokens, the loss's weights, and the oracle's output and gradients."""
    generator = torch.Generator().manual_seed(case.heads + case.tokens)
    shape = (case.batch, case.heads, case.tokens, case.head_dim)
    full = [torch.randn(shape, generator=generator).to(case.dtype).double().requires_grad_() for _ in range(3)]
    weight = torch.randn(shape, generator=generator).to(case.dtype).double()
    mask = _random_mask(case)
    q, k, v = full
    if case.kernel == "triton-int8" and case.sabotage != "no rounding":
        blocks = k.split(case.grid.k_axis.lengths.tolist(), dim=2)
        q, k = int8_and_back(q, (3,)), torch.cat([int8_and_back(block, (2, 3)) for block in blocks], dim=2)
    out = dense_attention(q, k, v, mask, torch.arange(case.tokens))
    (out * weight).sum().backward()
    gradients = [one.grad for one in full if one.grad is not None]
    return mask, full, weight, [out.detach(), *gradients]


def _random_mask(case: AttentionCase) -> BlockMask:
    """Asymmetric, with heads of different work, empty rows and an empty column; then the dense heads."""
    grid, rng = case.grid, np.random.default_rng(case.heads)
    head = np.linspace(0.2, 0.8, case.heads)[:, None, None]
    bits = rng.random((case.heads, grid.nq, grid.nk)) < head
    bits[rng.random((case.heads, grid.nq)) < 0.15] = False
    bits[:, :, 2] = False
    bits[case.heads - case.dense_heads :] = True
    return BlockMask(bits, grid)
