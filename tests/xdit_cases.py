"""What the workers run: xfuser's real Wan wrapper with db-SP attached, against stock diffusers in one process."""

from __future__ import annotations

import os
import types
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from dbsp_core.single import attach_single_process
from para_cases import fingerprint
from transformers_for_tests import Inputs, make_transformer


@dataclass(frozen=True)
class XditCase:
    """One forward pass. thw: size of the token grid."""

    thw: tuple[int, int, int]
    config: dict[str, Any] = field(default_factory=dict)
    batch: int = 1


def start_xfuser(rank: int, world: int) -> None:
    """xfuser on this worker's process group, once. Its degrees are `world` and 1: configurations name the strategy."""
    from dbsp_xdit.seams import install

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    install(active=True)
    from xfuser import xFuserArgs
    from xfuser.core.distributed import init_distributed_environment, initialize_runtime_state

    init_distributed_environment()
    engine, _ = xFuserArgs(model="tiny", ulysses_degree=world, ring_degree=1).create_config()
    config = types.SimpleNamespace(num_attention_heads=6)
    pipe = types.SimpleNamespace(transformer=types.SimpleNamespace(config=config), vae=None)
    initialize_runtime_state(pipe, engine)


def run_xdit_case(rank: int, world: int, case: XditCase) -> tuple[float, float]:
    """(largest difference from one process with the same mask, from dense attention), both on the whole output."""
    from xfuser.model_executor.models.transformers.transformer_wan import xFuserWanTransformer3DWrapper

    from dbsp_xdit import attach, detach

    inputs = Inputs.random("wan", case.thw, case.batch, text_tokens=7)
    stock = make_transformer("wan")
    wrapped = make_transformer("wan", cls=xFuserWanTransformer3DWrapper, attention_kwargs={"thw": None})
    wrapped.load_state_dict(stock.state_dict())
    pipe = types.SimpleNamespace(transformer=wrapped)
    with torch.no_grad():
        dense = stock(**inputs.arguments)[0]
        attach_single_process(stock, case.config)
        expected = stock(**inputs.arguments)[0]
        before = fingerprint(wrapped)
        attach(pipe, case.config)
        out = wrapped(**inputs.arguments)[0]
        with pytest.raises(ValueError, match="attached"):
            attach(pipe, case.config)
        detach(pipe)
        assert fingerprint(wrapped) == before, "detach left something behind"
        detach(pipe)  # nothing to do, and no harm
    return float((out - expected).abs().max()), float((out - dense).abs().max())
