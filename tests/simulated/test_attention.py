"""One attention on simulated GPUs: every UxRy, dense heads, dtypes, planners, KV exchanges, and gradients."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch

from dbsp_core import BlockGrid, BlockMask, SequenceGroup, SequenceLayout, Strategy, dual_balanced_attention
from dbsp_kernels import dense
from tests.gpu_node.faults import recorded
from tests.gpu_node.node import GpuNode
from tests.kernels.packed_inputs import int8_and_back
from tests.simulated.model_cases import own_device
from tests.support.attention_cases import shards
from tests.support.oracle import dense_attention, largest_difference
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
    device = own_device(rank)
    mask, full, weight, expected = once(lambda: _whole(case))
    layout = SequenceLayout.contiguous(case.tokens, world)
    own, mine, slots = shards([one.detach().to(case.dtype) for one in full], layout, rank, padded=True)
    local = [one.to(device).requires_grad_(case.gradients) for one in own]
    if case.sabotage == "another head":
        local[1] = local[1].roll(1, dims=1)
    options = {"planner": case.planner, "keys": case.keys, "kernel": case.kernel}
    group = SequenceGroup.from_group()
    out = dual_balanced_attention(*local, mask, case.strategy, layout=layout, group=group, **options)
    assert (out.device, out.dtype) == (device, case.dtype)
    errors = [largest_difference(out.cpu()[:, :, slots].double(), expected[0][:, :, mine])]
    if case.gradients:
        ((weights,), _, _) = shards([weight.to(case.dtype)], layout, rank, padded=True)
        (out * weights.to(device)).sum().backward()
        for one, right in zip(local, expected[1:], strict=True):
            assert one.grad is not None
            assert one.grad.device == device
            apart = largest_difference(one.grad.cpu()[:, :, slots].double(), right[:, :, mine])
            errors.append(apart / float(right.abs().max()))
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


STRATEGIES = ["U2R1", "U1R2", "U2R2", "U8R1"]
LONG_STRATEGIES = ["U4R1", "U1R4", "U4R2", "U2R4", "U1R8"]
LONG = pytest.mark.long
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def check(node: GpuNode, case: AttentionCase) -> None:
    for errors in node.run(Strategy.parse(case.strategy).world, largest_errors, case):
        assert max(errors) <= BOUND[case.dtype], errors


@pytest.mark.parametrize(
    ("strategy", "dense_heads"),
    [
        *product(STRATEGIES, (1,)),
        ("U1R2", 0),
        ("U2R1", 3),
        *(pytest.param(strategy, 1, marks=LONG) for strategy in LONG_STRATEGIES),
        *(pytest.param(*case, marks=LONG) for case in [("U2R1", 0), ("U2R2", 0), ("U1R2", 3), ("U2R2", 3)]),
    ],
)
def test_attention_on_gpus_equals_one_process(gpu_node: GpuNode, strategy: str, dense_heads: int) -> None:
    """With one dense head among sparse ones and text; with none, or nothing but dense ones."""
    check(gpu_node, AttentionCase(strategy, dense_heads=dense_heads, text_tokens=5 * (dense_heads % 2)))


@pytest.mark.parametrize("strategy", ["U1R2", *(pytest.param(one, marks=LONG) for one in ("U2R1", "U1R4", "U4R2"))])
def test_attention_in_bfloat16_is_near_one_process(gpu_node: GpuNode, strategy: str) -> None:
    check(gpu_node, AttentionCase(strategy, dtype=torch.bfloat16, dense_heads=1, heads=5))


@pytest.mark.parametrize(("strategy", "arch", "name"), [("U2R1", 80, "flash"), ("U1R2", 90, "cudnn")])
def test_dense_heads_run_on_the_kernel_that_torch_chooses(
    gpu_node: GpuNode, strategy: str, arch: int, name: str
) -> None:
    case = AttentionCase(strategy, dtype=torch.bfloat16, dense_heads=2, batch=2)
    for worst, names in gpu_node.run(2, fused_operators, case, arch=arch):
        assert worst <= BOUND[torch.bfloat16]
        assert names == {f"_scaled_dot_product_{name}_attention"}


@pytest.mark.parametrize(
    ("strategy", "dense_heads"),
    [("U1R2", 1), ("U2R2", 0), pytest.param("U2R1", 0, marks=LONG), pytest.param("U1R4", 1, marks=LONG)],
)
def test_gradients_on_gpus_equal_one_process(gpu_node: GpuNode, strategy: str, dense_heads: int) -> None:
    check(gpu_node, AttentionCase(strategy, gradients=True, dense_heads=dense_heads))


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase("U2R2", planner="contiguous", batch=2),
        AttentionCase("U2R2", planner="paper", heads=4),
        AttentionCase("U1R2", keys="needed", gradients=True),
        pytest.param(AttentionCase("U2R2", keys="needed", batch=2, dense_heads=1), marks=LONG),
        AttentionCase("U2R1", batch=2, dense_heads=1, gradients=True),
        AttentionCase("U4R1", heads=2, head_dim=24),
        AttentionCase("U2R1", tokens=20),
        pytest.param(AttentionCase("U1R2", batch=2, dense_heads=1), marks=LONG),
    ],
    ids=str,
)
def test_option_on_gpus_equals_one_process(gpu_node: GpuNode, case: AttentionCase) -> None:
    check(gpu_node, case)


@pytest.mark.parametrize("strategy", ["U2R2", pytest.param("U1R4", marks=LONG)])
def test_int8_kernel_equals_attention_of_the_rounded_numbers(gpu_node: GpuNode, strategy: str) -> None:
    check(gpu_node, AttentionCase(strategy, kernel="triton-int8", text_tokens=5, head_dim=32))


def test_int8_kernel_without_rounding_in_the_reference_differs(gpu_node: GpuNode) -> None:
    case = AttentionCase("U2R1", kernel="triton-int8", head_dim=32, sabotage="no rounding")
    assert 1e-4 < max(max(errors) for errors in gpu_node.run(2, largest_errors, case)) < 5e-2


def test_attention_with_wrong_keys_differs(gpu_node: GpuNode) -> None:
    case = AttentionCase("U2R1", sabotage="another head")
    assert max(max(errors) for errors in gpu_node.run(2, largest_errors, case)) > 1e-2
