"""torch.compile around a user's function that calls the library: the graph breaks there, and what comes is right."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch._dynamo

from dbsp_core import BlockMask, DualBalancedAttention, SequenceGroup, dual_balanced_attention, make_plan
from tests.support.attention_cases import Case, Inputs
from tests.support.oracle import largest_difference

CASE = Case("U1R2", heads=2, tokens=120)


def compiled(rank: int, world: int) -> tuple[float, list[int]]:
    """Returns how far a compiled function is from itself uncompiled, and the graphs after each of three calls."""
    given = Inputs.from_case(CASE, rank)
    q, k, v = given.local
    function = _with_the_library(given.mask, given)
    torch._dynamo.reset()
    graphs: list[int] = [0]

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        graphs[0] += 1
        return graph.forward

    fast, after, worst = torch.compile(function, backend=backend), [], 0.0
    for turn in range(3):
        with torch.no_grad():
            worst = max(worst, largest_difference(fast(q + turn, k, v), function(q + turn, k, v)))
        after.append(graphs[0])
    return worst, after


Function = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def _with_the_library(mask: BlockMask, given: Inputs) -> Function:
    """Returns a function that makes and calls a plan, an executor and db-SP's own function."""

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        plan = make_plan(mask, "U1R2", layout=given.layout)
        attend = DualBalancedAttention.prepare(
            plan, mask, given.layout, SequenceGroup.from_group(), n_local=q.shape[2]
        )
        again = dual_balanced_attention(q * plan.rho, k, v, mask, "U1R2", layout=given.layout)
        return attend(q * 2, k, v) + again + 1

    return function


def test_compiled_function_equals_itself_uncompiled(pool):
    for difference, graphs in pool(2).run(compiled):
        assert difference <= 1e-6
        assert graphs[0] >= 1, "what is around it is compiled"
        assert graphs[0] == graphs[1] == graphs[2], "and once"
