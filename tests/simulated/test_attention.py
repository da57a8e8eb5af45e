"""One attention on simulated GPUs: every UxRy, dense heads, dtypes, planners, KV exchanges, and gradients."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from dbsp_core import Strategy
from tests.gpu_node.node import GpuNode
from tests.simulated.attention_cases import AttentionCase, fused_operators, largest_errors

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
