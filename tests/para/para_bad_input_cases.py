"""What the workers run: mistakes that must be rejected on every rank, and ParaAttention's own faults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import dbsp_para
from dbsp_core.config import DbspConfig
from dbsp_core.sources import DenseSource
from tests.para.para_cases import para_mesh
from tests.support.models.tiny_pipelines import difference, fingerprint
from tests.support.models.transformers_for_tests import Inputs, make_transformer

MASK = {"source": "dense", "block_q": 16, "block_k": 16}


def _processor_past_torch(transformer: Any, rank: int) -> None:
    class Past:
        def __call__(self, attn: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            return hidden_states

    processors = [block.attn1.processor for block in transformer.blocks]
    dbsp_para.parallelize_transformer(transformer, config={"mask": MASK})
    for block in transformer.blocks:
        block.attn1.processor = Past()
    try:
        _forward(transformer)
    finally:
        for block, processor in zip(transformer.blocks, processors, strict=True):
            block.attn1.processor = processor
        dbsp_para.unparallelize(transformer)


def _by_para_attn(transformer: Any, rank: int) -> None:
    from para_attn.context_parallel.diffusers_adapters import parallelize_transformer

    parallelize_transformer(make_transformer("wan"), mesh=para_mesh(dist.get_world_size()))
    taken = parallelize_transformer(make_transformer("wan"), mesh=para_mesh(dist.get_world_size()))
    dbsp_para.parallelize_transformer(taken)


def _by_dbsp(transformer: Any, rank: int) -> None:
    dbsp_para.parallelize_transformer(transformer)
    try:
        dbsp_para.parallelize_transformer(transformer)
    finally:
        dbsp_para.unparallelize(transformer)


def _half_way(transformer: Any, rank: int) -> None:
    """The last block cannot be changed, after all others have been."""
    last = transformer.blocks[-1].attn1
    with mock.patch.object(type(last), "__setattr__", _rejecting(last)):
        dbsp_para.parallelize_transformer(transformer)


def _rejecting(rejects: nn.Module) -> Callable[[Any, str, Any], None]:
    def set_attribute(self: nn.Module, name: str, value: Any) -> None:
        if self is rejects:
            raise ValueError("this part cannot be changed")
        nn.Module.__setattr__(self, name, value)

    return set_attribute


def _two_d_mesh(transformer: Any, rank: int) -> None:
    size = dist.get_world_size()
    dbsp_para.parallelize_transformer(transformer, mesh=dist.init_device_mesh("cpu", (1, size)))


def _split_batch(transformer: Any, rank: int) -> None:
    dbsp_para.parallelize_transformer(transformer, mesh=para_mesh(dist.get_world_size(), max_batch_dim_size=2))


def _from_xdit(transformer: Any, rank: int) -> None:
    wrapper = type("xFuserWanTransformer3DWrapper", (type(transformer),), {})
    dbsp_para.parallelize_transformer(make_transformer("wan", cls=wrapper))


def _config(**by_rank: Any) -> Callable[[Any, int], None]:
    """by_rank: config, and another for rank 1."""

    def attach(transformer: Any, rank: int) -> None:
        config = by_rank.get("odd", by_rank["config"]) if rank == 1 else by_rank["config"]
        dbsp_para.parallelize_transformer(transformer, config=config)

    return attach


def _forward(transformer: Any, **options: Any) -> Any:
    with torch.no_grad():
        return transformer(**Inputs.random("wan", (3, 5, 7), 1, 7).arguments | options)[0]


MISTAKES: dict[str, tuple[Callable[[Any, int], None], str]] = {
    "a processor past torch's attention": (_processor_past_torch, "keep to attention backend 'native'"),
    "parallelized by para-attn": (_by_para_attn, "parallelized already"),
    "parallelized by db-SP": (_by_dbsp, "parallelized already"),
    "xDiT's transformer": (_from_xdit, "use dbsp_xdit.attach"),
    "a pipeline without transformer": (lambda *_: dbsp_para.parallelize_pipe(object()) and None, "object has none"),
    "a model that is not known": (
        lambda *_: dbsp_para.parallelize_transformer(nn.Linear(1, 1)) and None,
        "does not know Linear",
    ),
    "a failure half-way": (_half_way, "cannot be changed"),
    "a mesh without names": (_two_d_mesh, "mesh must be a device mesh with a dimension ring or ulysses"),
    "not a mesh": (
        lambda transformer, _: dbsp_para.parallelize_transformer(transformer, mesh=(1, 2)) and None,
        "got a tuple",
    ),
    "a mesh that splits the batch": (_split_batch, "the mesh splits the batch over 2 groups of ranks"),
    "ring on a kernel without LSE": (
        _config(config={"kernel": "sparge", "strategy": "U1R2"}),
        "returns no log-sum-exp",
    ),
    "a strategy for other ranks": (_config(config={"strategy": "U2R2"}), "U2R2"),
    "an unknown key": (_config(config={"strateggy": "U1R2"}), "did you mean 'strategy'"),
    "a number for config": (_config(config=5), "config must be a DbspConfig"),
    "no such file": (_config(config="nowhere.yaml"), "does not exist"),
    "no such file on one rank": (_config(config={}, odd="nowhere.yaml"), "rank(s) [1]: configuration file"),
    "another config on one rank": (
        _config(config=DbspConfig(mask=DenseSource()), odd={"planner": "contiguous"}),
        "the configuration differs on rank(s)",
    ),
}


def run_mistake(rank: int, world: int, name: str) -> tuple[str, str]:
    """(kind and message of the error, the same from an intact run afterwards: "" as it must be)."""
    transformer = make_transformer("wan")
    before, dense = fingerprint(transformer), _forward(transformer)
    try:
        MISTAKES[name][0](transformer, rank)
        message = "nothing was raised"
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    after = fingerprint(transformer)
    left = "" if after == before else f"left behind: {[a for a in after if a not in before]}"
    dbsp_para.parallelize_transformer(transformer, config={"mask": MASK})
    if difference(_forward(transformer), dense) > 1e-5:
        left += "the next run is wrong"
    dbsp_para.unparallelize(transformer)
    return message, left


def run_stock(rank: int, world: int, model: str, frames: int) -> float | str:
    """Stock para-attn's relative difference from one process, or what it raises."""
    from para_attn.context_parallel.diffusers_adapters import parallelize_transformer

    transformer = make_transformer(model)
    inputs = Inputs.random(model, (frames, 4, 4), 1, 8)
    with torch.no_grad():
        expected = transformer(**inputs.arguments)[0]
        parallelize_transformer(transformer, mesh=para_mesh(world))
        try:
            out = transformer(**inputs.arguments)[0]
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return float((out - expected).norm() / expected.norm())
