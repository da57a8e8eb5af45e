"""What the workers run: a compiled transformer under dbsp_para, with the graphs it runs counted."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo

import dbsp_para
from transformers_for_tests import GraphCounter, Inputs, make_transformer


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
