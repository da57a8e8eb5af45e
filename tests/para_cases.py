"""What the workers run: stock diffusers transformers under dbsp_para, against one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

import dbsp_para
from dbsp_core.single import attach_single_process
from transformers_for_tests import Inputs, make_transformer


@dataclass(frozen=True)
class ParaCase:
    """One forward pass. thw: size of the token grid."""

    model: str
    thw: tuple[int, int, int]
    config: dict[str, Any] = field(default_factory=dict)
    batch: int = 1
    text_tokens: int = 7


def run_para_case(rank: int, world: int, case: ParaCase) -> tuple[float, float]:
    """(largest difference from one process with the same mask, from dense attention), both on the whole output."""
    transformer = make_transformer(case.model)
    inputs = Inputs.random(case.model, case.thw, case.batch, case.text_tokens)
    with torch.no_grad():
        dense = transformer(**inputs.arguments)[0]
        single = attach_single_process(transformer, case.config)
        expected = transformer(**inputs.arguments)[0]
        single.detach()

        before = fingerprint(transformer)
        dbsp_para.parallelize_transformer(transformer, config=case.config)
        out = transformer(**inputs.arguments)[0]
        dbsp_para.unparallelize(transformer)
        assert fingerprint(transformer) == before, "unparallelize left something behind"
        assert torch.equal(transformer(**inputs.arguments)[0], dense)
    return float((out - expected).abs().max()), float((out - dense).abs().max())


def fingerprint(module: torch.nn.Module) -> list[Any]:
    """Classes, instance attributes and hooks of a module and all in it, to compare before and after."""
    state = []
    for name, part in module.named_modules():
        hooks = [len(part._forward_hooks), len(part._forward_pre_hooks)]
        processor = getattr(part, "processor", None)
        state.append((name, type(part), sorted(vars(part)), hooks, sorted(vars(processor)) if processor else None))
    return state
