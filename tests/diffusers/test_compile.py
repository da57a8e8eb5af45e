"""torch.compile around db-SP: the same output, and no break within blocks."""

from __future__ import annotations

import pytest
import torch
from torch._inductor.utils import get_first_incompatible_cudagraph_node
from torch.fx.experimental.proxy_tensor import make_fx

from tests.diffusers.compile_cases import (
    run_compiled,
    run_compiled_before,
    run_compiled_blocks,
    run_compiled_guided,
    run_inductor,
)

MASKS = {
    "window": {"source": "window", "window": [3, 3, 3], "block_q": 16, "block_k": 16},
    "sparge": {"source": "sparge", "cdf": 0.6, "similarity": 0.0, "block_q": 16, "block_k": 16},
}


@pytest.mark.long
@pytest.mark.parametrize(("model", "mask"), [("wan", "sparge"), ("cogvideox", "window")])
def test_compiled_transformer_equals_uncompiled_with_few_graphs(pool, model, mask):
    graphs = {}
    for layers in (1, 2):
        config = {"mask": MASKS[mask], "strategy": "U1R2"}
        for difference, runs, recompiled in pool(2).run(run_compiled, model, layers, config):
            assert difference <= 1e-6
            assert recompiled == 0
            graphs[layers] = runs
    assert graphs[2] == graphs[1] <= 8, "blocks need none of their own"


@pytest.mark.parametrize(
    ("model", "mask", "graphs"),
    [
        ("wan", "sparge", 1),
        # as stock: two kinds of block, one of them with and without a projection
        pytest.param("vace", "window", 3, marks=pytest.mark.long),
        pytest.param("flux", "window", 3, marks=pytest.mark.long),
        # and what is cut at the first block, and at each
        pytest.param("qwen", "window", 3, marks=pytest.mark.long),
        pytest.param("hunyuan1.5", "window", 5, marks=pytest.mark.long),
    ],
)
def test_repeated_blocks_compile_without_a_graph_break(pool, model, mask, graphs):
    """`fullgraph=True` raises where there is one. 12 layers of Wan are one graph, as the layer that an attention is of
    is a tensor: with an integer, each would be compiled anew."""
    config = {"mask": MASKS[mask], "strategy": "U1R2"}
    for difference, compiled, recompiled in pool(2).run(run_compiled_blocks, model, config):
        assert difference <= 1e-5
        assert compiled == graphs
        assert recompiled == 0


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "how"),
    [
        ("wan", "blocks"),
        ("wan", "whole"),
        ("wan", "in place"),  # with guidance: below
        ("hunyuan1.5", "blocks"),
    ],
)
def test_transformer_compiled_before_db_sp_equals_uncompiled(pool, model, how):
    config = {"mask": MASKS["window"], "strategy": "U1R2"}
    for with_db_sp, without in pool(2).run(run_compiled_before, model, how, config):
        assert with_db_sp <= 1e-5
        assert without <= 1e-5


@pytest.mark.long
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_transformer_compiled_in_place_computes_one_cfg_pass_per_half(pool, first):
    for difference, runs, halved, left_compiled in pool(2).run(run_compiled_guided, first, {"mask": MASKS["window"]}):
        assert difference <= 1e-5
        assert runs > 0, "what a half computes must be compiled"
        assert halved
        assert left_compiled


@pytest.mark.long
@pytest.mark.parametrize(("how", "mode"), [("blocks", None), ("whole", "reduce-overhead")])
def test_code_of_inductor_equals_uncompiled(pool, how, mode):
    """On CPUs, where "reduce-overhead" has no CUDA graphs: the other tests run the graphs as they were traced."""
    for difference, kernels in pool(2).run(run_inductor, how, mode, {"mask": MASKS["sparge"], "strategy": "U1R2"}):
        assert difference <= 1e-5
        assert kernels > 0


def test_attention_is_kept_out_of_cuda_graphs():
    """A graph would replay the plan and the split sizes of the call in which it was captured."""

    def attend(q, number):
        return torch.ops.dbsp.attend.default(q * 2, q, q, number, None, None) + 1

    graph = make_fx(attend, tracing_mode="fake")(torch.randn(1, 2, 8, 4), torch.tensor(0))
    node = get_first_incompatible_cudagraph_node(graph)
    assert node is not None
    assert node.target is torch.ops.dbsp.attend.default
