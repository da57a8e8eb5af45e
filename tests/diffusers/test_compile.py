"""torch.compile around db-SP: the same output, and no break within blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._dynamo
from torch._inductor.utils import get_first_incompatible_cudagraph_node
from torch.fx.experimental.proxy_tensor import make_fx

import dbsp_diffusers
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.outcomes import assert_near, outputs

MASKS = {
    "window": {"source": "window", "window": [3, 3, 3], "block_q": 16, "block_k": 16},
    "sparge": {"source": "sparge", "cdf": 0.6, "similarity": 0.0, "block_q": 16, "block_k": 16},
}


@torch.no_grad()
def run_compiled_blocks(rank: int, world: int, model: str, config: dict[str, Any], count: int) -> None:
    """Compiles blocks, each kind whole as diffusers recommends, while db-SP is enabled, and then enables it again."""
    transformer = make_tiny_transformer(model, **({"num_layers": 3} if model == "wan" else {}))
    inputs, graphs = tiny_inputs(model), list[torch.fx.GraphModule]()

    def keep(graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    stock = outputs(transformer, inputs)
    dbsp_diffusers.enable(transformer, config)
    expected = outputs(transformer, inputs)
    torch._dynamo.reset()
    transformer.compile_repeated_blocks(fullgraph=True, backend=keep)
    for _ in range(2):
        assert_near(outputs(transformer, inputs), expected, stock)
        assert len(graphs) == count, "and none in a second pass"
    dbsp_diffusers.disable(transformer)
    assert_near(outputs(transformer, inputs), stock)
    session = dbsp_diffusers.enable(torch.compile(transformer), config)
    assert dbsp_diffusers.session_of(transformer) is session
    assert_near(outputs(transformer, inputs), expected)
    dbsp_diffusers.disable(transformer)


@pytest.mark.parametrize(
    ("model", "mask", "graphs"),
    [
        ("wan", "sparge", 1),
        # as stock, two kinds of block; and what is cut at the first block, and at each
        pytest.param("hunyuan1.5", "window", 5, marks=pytest.mark.long),
    ],
)
def test_repeated_blocks_compile_without_a_graph_break(pool, model, mask, graphs):
    """Relies on `fullgraph=True`, which raises where there is one. Three layers of Wan are one graph, as a layer's
    number is a tensor: with an integer, each would be compiled anew."""
    pool(2).run(run_compiled_blocks, model, {"mask": MASKS[mask], "strategy": "U1R2"}, graphs)


def test_attention_is_kept_out_of_cuda_graphs():
    """Guards against graphs that replay the plan and the split sizes of the call in which they were captured."""

    def attend(q, number):
        return torch.ops.dbsp.attend.default(q * 2, q, q, number, None, None) + 1

    graph = make_fx(attend, tracing_mode="fake")(torch.randn(1, 2, 8, 4), torch.tensor(0))
    node = get_first_incompatible_cudagraph_node(graph)
    assert node is not None
    assert node.target is torch.ops.dbsp.attend.default
