"""One attention on simulated GPUs: every UxRy, dense heads, dtypes, planners, KV exchanges, and gradients."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from dbsp_core import SequenceGroup, Strategy, dual_balanced_attention
from dbsp_kernels import dense
from tests.gpu_node.faults import recorded
from tests.gpu_node.node import GpuNode
from tests.kernels.packed_inputs import int8_and_back
from tests.simulated.model_cases import own_device
from tests.support.attention_cases import Case, Inputs, shards, whole
from tests.support.oracle import dense_attention, largest_difference
from tests.support.shared import shared

small = partial(Case, tokens=60, block_k=8, density=0.5, padded=True, debug=False)


@shared
def one_process(case: Case) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns the loss's weights, and the oracle's output and gradients of q, k and v."""
    mask, full = whole(case.attention)
    q, k, v = leaves = [one.double().requires_grad_() for one in full]
    weight = torch.randn(q.shape, generator=torch.Generator().manual_seed(7)).to(case.dtype)
    if case.kernel == "triton-int8" and case.sabotage != "no rounding":
        blocks = k.split(case.grid.k_axis.lengths.tolist(), dim=2)
        q, k = int8_and_back(q, (3,)), torch.cat([int8_and_back(block, (2, 3)) for block in blocks], dim=2)
    out = dense_attention(q, k, v, mask, torch.arange(case.tokens))
    return weight, [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


def largest_errors(rank: int, world: int, case: Case, gradients: bool = False) -> list[float]:
    """Returns the largest error of this rank's output, and of its gradients relative to the largest one."""
    device, given, (weight, expected) = own_device(rank), Inputs.from_case(case, rank), one_process(case)
    local = [one.to(device).requires_grad_(gradients) for one in given.local]
    if case.sabotage == "another head":
        local[1] = local[1].roll(1, dims=1)
    options = {"planner": case.planner, "keys": case.keys, "kernel": case.kernel}
    group = SequenceGroup.from_group()
    out = dual_balanced_attention(*local, given.mask, case.strategy, layout=given.layout, group=group, **options)
    assert (out.device, out.dtype) == (device, case.dtype)
    errors = [largest_difference(out.cpu()[:, :, given.slots].double(), expected[0][:, :, given.mine])]
    if gradients:
        ((weights,), _, _) = shards([weight], given.layout, rank, padded=True)
        (out * weights.to(device)).sum().backward()
        for one, right in zip(local, expected[1:], strict=True):
            assert one.grad is not None
            assert one.grad.device == device
            apart = largest_difference(one.grad.cpu()[:, :, given.slots].double(), right[:, :, given.mine])
            errors.append(apart / float(right.abs().max()))
    return errors


def fused_operators(rank: int, world: int, case: Case) -> tuple[float, set[str]]:
    """Returns the largest error, and torch's fused attentions that ran."""
    dense._chosen.cache_clear()  # a test before may have run on GPUs of another architecture
    worst = max(largest_errors(rank, world, case))
    return worst, {name for name in recorded.operators if name.startswith("_scaled_dot_product")}


LONG = pytest.mark.long
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def check(node: GpuNode, case: Case, gradients: bool = False) -> None:
    for errors in node.run(Strategy.parse(case.strategy).world, largest_errors, case, gradients):
        assert max(errors) <= BOUND[case.dtype], errors


CASES = {
    "U2R2": small("U2R2", dense_heads=1, text_tokens=5),
    "dense heads alone": small("U2R1", dense_heads=3, text_tokens=5),
    "bfloat16": small("U1R2", dtype=torch.bfloat16, dense_heads=1, heads=5),
    "selective KV exchange": small("U2R2", keys="needed", batch=2, dense_heads=1),
    "fewer heads than ranks": small("U4R1", heads=2, head_dim=24),
    "absent keys": small("U1R2", text_tokens=5, absent=True, batch=2),
    "int8 kernel": small("U2R1", kernel="triton-int8", text_tokens=5, head_dim=32),
}
LONG_STRATEGIES = ("U4R1", "U1R4", "U8R1", "U4R2", "U2R4", "U1R8")


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(case, id=name) for name, case in CASES.items()),
        *(
            pytest.param(small(strategy, dense_heads=1, text_tokens=5), id=strategy, marks=LONG)
            for strategy in LONG_STRATEGIES
        ),
    ],
)
def test_attention_on_gpus_equals_one_process(gpu_node: GpuNode, case: Case) -> None:
    check(gpu_node, case)


def errors_and_launches(rank: int, world: int, case: Case) -> tuple[float, int, int]:
    """Returns the largest error, and the launches of the attention and of the merge of parts, of all ranks so far."""
    errors = largest_errors(rank, world, case)
    return max(errors), recorded.launches["forward_kernel"], recorded.launches["merge_parts_kernel"]


def test_long_rows_are_cut_on_gpus(gpu_node: GpuNode) -> None:
    """5 rows of up to 65 blocks in each chunk, on 8 slots: parts have at least 16."""
    case = small("U1R2", tokens=260, block_q=64, block_k=2, heads=1, density=0.9, absent=True)
    for error, kernels, merges in gpu_node.run(2, errors_and_launches, case):
        assert error <= 1e-5
        assert 0 < merges <= kernels


@pytest.mark.parametrize(("strategy", "arch", "name"), [("U2R1", 80, "flash"), ("U1R2", 90, "cudnn")])
def test_dense_heads_run_on_the_fused_kernel_of_the_gpu(
    gpu_node: GpuNode, strategy: str, arch: int, name: str
) -> None:
    case = small(strategy, dtype=torch.bfloat16, dense_heads=2, batch=2)
    for worst, names in gpu_node.run(2, fused_operators, case, arch=arch):
        assert worst <= BOUND[torch.bfloat16]
        assert names == {f"_scaled_dot_product_{name}_attention"}


@pytest.mark.parametrize(
    "case",
    [small("U1R2", keys="needed"), small("U2R1", batch=2, dense_heads=1)],
    ids=["selective KV exchange", "dense head, batch"],
)
def test_gradients_on_gpus_equal_one_process(gpu_node: GpuNode, case: Case) -> None:
    check(gpu_node, case, gradients=True)


@pytest.mark.parametrize(
    ("case", "least", "most"),
    [
        (small("U2R1", sabotage="another head"), 1e-2, float("inf")),
        (small("U2R1", kernel="triton-int8", head_dim=32, sabotage="no rounding"), 1e-4, 5e-2),
    ],
    ids=["keys of another head", "no rounding in the reference of int8"],
)
def test_wrong_attention_differs(gpu_node: GpuNode, case: Case, least: float, most: float) -> None:
    assert least < max(max(errors) for errors in gpu_node.run(2, largest_errors, case)) < most
