"""One attention on simulated GPUs: every UxRy, dense heads, dtypes, planners, ways for keys, and gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dbsp_core import Strategy
from tests.gpu_node.node import GpuNode
from tests.simulated.attention_cases import AttentionCase, fused_operators, largest_errors

STRATEGIES = ["U2R1", "U1R2", "U4R1", "U2R2", "U1R4", "U8R1", "U4R2", "U2R4", "U1R8"]
BOUND = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


def check(node: GpuNode, case: AttentionCase) -> None:
    for errors in node.run(Strategy.parse(case.strategy).world, largest_errors, case):
        assert max(errors) <= BOUND[case.dtype], errors


@pytest.mark.parametrize("dense_heads", [0, 1, 3])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_is_exact(gpu_node: GpuNode, strategy: str, dense_heads: int) -> None:
    """With no dense head, one among sparse ones, and nothing but dense ones; text in every other case."""
    case = AttentionCase(strategy, dense_heads=dense_heads, text_tokens=5 * (dense_heads % 2))
    check(gpu_node, case)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_bfloat16_is_close(gpu_node: GpuNode, strategy: str) -> None:
    check(gpu_node, AttentionCase(strategy, dtype=torch.bfloat16, dense_heads=1, heads=5))


@pytest.mark.parametrize(("arch", "name"), [(80, "flash"), (90, "cudnn")])
@pytest.mark.parametrize("strategy", ["U2R1", "U1R2"])
def test_dense_heads_run_on_the_kernel_that_torch_chooses(
    gpu_node: GpuNode, strategy: str, arch: int, name: str
) -> None:
    case = AttentionCase(strategy, dtype=torch.bfloat16, dense_heads=2, batch=2)
    for worst, names in gpu_node.run(2, fused_operators, case, arch=arch):
        assert worst <= BOUND[torch.bfloat16]
        assert names == {f"_scaled_dot_product_{name}_attention"}


@pytest.mark.parametrize("dense_heads", [0, 1])
@pytest.mark.parametrize("strategy", ["U2R1", "U1R2", "U2R2", "U1R4"])
def test_gradients_are_exact(gpu_node: GpuNode, strategy: str, dense_heads: int) -> None:
    check(gpu_node, AttentionCase(strategy, gradients=True, dense_heads=dense_heads))


@pytest.mark.parametrize(
    "case",
    [
        AttentionCase("U2R2", planner="contiguous", batch=2),
        AttentionCase("U2R2", planner="paper", heads=4),
        AttentionCase("U1R2", keys="needed", gradients=True),
        AttentionCase("U2R2", keys="needed", batch=2, dense_heads=1),
        AttentionCase("U1R4", keys="all"),
        AttentionCase("U2R1", batch=2, dense_heads=1, gradients=True),
        AttentionCase("U4R1", heads=2, width=24),
        AttentionCase("U2R1", tokens=20),
        AttentionCase("U1R2", batch=2, dense_heads=1),
    ],
    ids=str,
)
def test_every_way_is_exact(gpu_node: GpuNode, case: AttentionCase) -> None:
    check(gpu_node, case)


@pytest.mark.parametrize("strategy", ["U2R1", "U1R2", "U2R2", "U1R4"])
def test_int8_kernel_equals_attention_of_the_rounded_numbers(gpu_node: GpuNode, strategy: str) -> None:
    check(gpu_node, AttentionCase(strategy, kernel="triton-int8", text_tokens=5, width=32))


def test_int8_kernel_is_apart_from_exact_attention(gpu_node: GpuNode) -> None:
    case = AttentionCase("U2R1", kernel="triton-int8", width=32, sabotage="no rounding")
    assert 1e-4 < max(max(errors) for errors in gpu_node.run(2, largest_errors, case)) < 5e-2


def test_a_fault_is_found(gpu_node: GpuNode) -> None:
    case = replace(AttentionCase("U2R1"), sabotage="another head")
    assert max(max(errors) for errors in gpu_node.run(2, largest_errors, case)) > 1e-2
