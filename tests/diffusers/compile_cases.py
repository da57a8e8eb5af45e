"""What the workers run: compiled transformers, with the graphs they run counted."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo
from torch._inductor import config as inductor_config
from torch._inductor import metrics as inductor_metrics

import dbsp_diffusers
import dbsp_para
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.models.transformers_for_tests import GraphCounter, Inputs, make_transformer


def run_compiled(rank: int, world: int, model: str, layers: int, config: dict[str, Any]) -> tuple[float, int, int]:
    """(largest difference from the same uncompiled, graphs a forward pass runs, graphs compiled in a second pass)."""
    transformer = make_transformer(model, num_layers=layers)
    inputs = Inputs.random(model, (3, 5, 7), 1, 7).arguments
    graphs = GraphCounter()
    torch._dynamo.reset()
    with torch.no_grad():
        dbsp_para.parallelize_transformer(transformer, config=config)
        expected = transformer(**inputs)[0]
        fast = torch.compile(transformer, backend=graphs)
        fast(**inputs)
        graphs.runs, before = 0, graphs.compiled
        out = fast(**inputs)[0]
        dbsp_para.unparallelize(transformer)
    return float((out - expected).abs().max()), graphs.runs, graphs.compiled - before


def _compiled(transformer: Any, how: str) -> Any:
    """Returns what is called of a transformer that is compiled in one of three ways."""
    if how == "blocks":
        transformer.compile_repeated_blocks(fullgraph=True, backend=GraphCounter())
    elif how == "in place":
        transformer.compile(backend=GraphCounter())
    else:
        return torch.compile(transformer, backend=GraphCounter())
    return transformer


def run_compiled_before(rank: int, world: int, model: str, how: str, config: dict[str, Any]) -> tuple[float, float]:
    """Of what was compiled, and ran, before db-SP the largest differences from the same uncompiled, with db-SP and
    without it again."""
    transformer, inputs = make_tiny_transformer(model, num_layers=1), tiny_inputs(model)
    torch._dynamo.reset()
    with torch.no_grad():
        stock = transformer(**inputs)[0]
        dbsp_diffusers.enable(transformer, config)
        expected = transformer(**inputs)[0]
        dbsp_diffusers.disable(transformer)
        fast = _compiled(transformer, how)
        fast(**inputs)
        dbsp_diffusers.enable(fast, config)
        out = fast(**inputs)[0]
        dbsp_diffusers.disable(fast)
        after = fast(**inputs)[0]
    assert float((expected - stock).abs().max()) > 1e-3, "the mask must leave something out"
    return float((out - expected).abs().max()), float((after - stock).abs().max())


def run_compiled_blocks(rank: int, world: int, model: str, config: dict[str, Any]) -> tuple[float, int, int]:
    """As diffusers recommends, each kind of block by itself and whole: (largest difference from the same uncompiled,
    graphs compiled in a first pass, in a second)."""
    transformer = make_tiny_transformer(model, **({"num_layers": 12} if model == "wan" else {}))
    inputs, graphs = tiny_inputs(model), GraphCounter()
    torch._dynamo.reset()
    with torch.no_grad():
        dbsp_diffusers.enable(transformer, config)
        expected = transformer(**inputs)[0]
        transformer.compile_repeated_blocks(fullgraph=True, backend=graphs)
        out, first = transformer(**inputs)[0], graphs.compiled
        again = transformer(**inputs)[0]
        dbsp_diffusers.disable(transformer)
    difference = max(float((one - expected).abs().max()) for one in (out, again))
    return difference, first, graphs.compiled - first


def run_inductor(rank: int, world: int, how: str, mode: str | None, config: dict[str, Any]) -> tuple[float, int]:
    """Returns how much two passes in code of torch's own compiler differ from the same uncompiled, and its kernels."""
    transformer, inputs = make_tiny_transformer("wan", num_layers=1), tiny_inputs("wan")
    torch._dynamo.reset()
    inductor_metrics.reset()
    with torch.no_grad(), inductor_config.patch(compile_threads=1, force_disable_caches=True):
        dbsp_diffusers.enable(transformer, config)
        expected = transformer(**inputs)[0]
        if how == "blocks":
            transformer.compile_repeated_blocks(fullgraph=True, mode=mode)
        else:
            transformer.compile(mode=mode)
        outs = [transformer(**inputs)[0] for _ in range(2)]
        dbsp_diffusers.disable(transformer)
    return max(float((out - expected).abs().max()) for out in outs), inductor_metrics.generated_kernel_count


def run_compiled_guided(rank: int, world: int, first: bool, config: dict[str, Any]) -> tuple[float, int, bool, bool]:
    """Compiles a transformer in place, before or after guidance parallelism is enabled.

    Returns the difference from the same uncompiled, graphs that were run in a pair of passes, whether half of the
    ranks computed each pass, and whether the transformer is left compiled.
    """
    transformer, inputs, graphs = make_tiny_transformer("wan", num_layers=1), tiny_inputs("wan"), GraphCounter()
    torch._dynamo.reset()

    def passes() -> tuple[torch.Tensor, torch.Tensor]:
        with transformer.cache_context("cond"):
            wanted = transformer(**inputs)[0]
        with transformer.cache_context("uncond"):
            unwanted = transformer(**inputs | {"encoder_hidden_states": -inputs["encoder_hidden_states"]})[0]
        return wanted + 0, unwanted + 0

    with torch.no_grad():
        dbsp_diffusers.enable(transformer, config, guidance=True)
        expected = passes()
        dbsp_diffusers.disable(transformer)
        if first:
            transformer.compile(backend=graphs)
        session = dbsp_diffusers.enable(transformer, config, guidance=True)
        if not first:
            transformer.compile(backend=graphs)
        found = passes()
        halved = session.statistics()["calls"] == session.layers
        runs = graphs.runs
        dbsp_diffusers.disable(transformer)
    names = vars(transformer)
    compiled = names["_compiled_call_impl"] is not None and not {"compile", "_call_impl"} & names.keys()
    return (
        max(float((one - other).abs().max()) for one, other in zip(found, expected, strict=True)),
        runs,
        halved,
        compiled,
    )
