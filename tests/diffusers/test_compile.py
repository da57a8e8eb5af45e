"""torch.compile around db-SP: the same output, and no break within blocks."""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass
class GraphCounter:
    """A backend of torch.compile that runs graphs as they are, and counts them.

    compiled, runs: graphs compiled, and run
    """

    compiled: int = 0
    runs: int = 0

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]) -> Any:
        self.compiled += 1

        def run(*args: torch.Tensor) -> Any:
            self.runs += 1
            return graph.forward(*args)

        return run


def compiled(transformer: Any, how: str, **options: Any) -> Any:
    """Returns what is called of a transformer that is compiled in one of three ways."""
    torch._dynamo.reset()
    if how == "blocks":  # as diffusers recommends, each kind of block by itself and whole
        transformer.compile_repeated_blocks(fullgraph=True, **options)
    elif how == "in place":
        transformer.compile(**options)
    else:
        return torch.compile(transformer, **options)
    return transformer


@torch.no_grad()
def run_compiled_blocks(rank: int, world: int, model: str, config: dict[str, Any], count: int) -> None:
    transformer = make_tiny_transformer(model, **({"num_layers": 3} if model == "wan" else {}))
    inputs, graphs = tiny_inputs(model), GraphCounter()
    dbsp_diffusers.enable(transformer, config)
    expected = outputs(transformer, inputs)
    compiled(transformer, "blocks", backend=graphs)
    for _ in range(2):
        assert_near(outputs(transformer, inputs), expected)
        assert graphs.compiled == count, "and none in a second pass"
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


@torch.no_grad()
def run_compiled_before(rank: int, world: int, model: str, how: str, config: dict[str, Any]) -> None:
    """Compiles a transformer, and runs it, before db-SP is enabled; and again after `disable`."""
    transformer, inputs = make_tiny_transformer(model, num_layers=1), tiny_inputs(model)
    stock = outputs(transformer, inputs)
    dbsp_diffusers.enable(transformer, config)
    expected = outputs(transformer, inputs)
    dbsp_diffusers.disable(transformer)
    fast = compiled(transformer, how, backend=GraphCounter())
    fast(**inputs)
    dbsp_diffusers.enable(fast, config)
    assert_near(outputs(fast, inputs), expected, stock)
    dbsp_diffusers.disable(fast)
    assert_near(outputs(fast, inputs), stock)


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "how"), [("wan", "blocks"), ("wan", "whole"), ("wan", "in place"), ("hunyuan1.5", "blocks")]
)
def test_transformer_compiled_before_db_sp_equals_uncompiled(pool, model, how):
    pool(2).run(run_compiled_before, model, how, {"mask": MASKS["window"], "strategy": "U1R2"})


def test_attention_is_kept_out_of_cuda_graphs():
    """Guards against graphs that replay the plan and the split sizes of the call in which they were captured."""

    def attend(q, number):
        return torch.ops.dbsp.attend.default(q * 2, q, q, number, None, None) + 1

    graph = make_fx(attend, tracing_mode="fake")(torch.randn(1, 2, 8, 4), torch.tensor(0))
    node = get_first_incompatible_cudagraph_node(graph)
    assert node is not None
    assert node.target is torch.ops.dbsp.attend.default
