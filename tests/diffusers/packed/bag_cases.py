"""What the workers run: sequences of several sizes in bags of ranks, against one by one in one process."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dbsp_diffusers
from dbsp_core.cost.sequence_cost import bag_layout
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.planning.sequences import SequencePlan
from dbsp_diffusers import PackedSample, packed_forward, packed_forward_local
from dbsp_diffusers.models import architecture_of
from tests.diffusers.packed.packed_model_cases import (
    CONFIGS,
    apart,
    drawn_sample,
    gradients_of,
    loss_of,
    make_model,
    one_by_one,
    wide_floats,
)
from tests.support.models.tiny_transformers import make_tiny_transformer
from tests.support.references import by_first_rank
from tests.support.settings import with_debug
from tests.support.single_process import attach_single_process


@dataclass(frozen=True)
class BagCase:
    """A training step or two. samples: how many in each; what and whose they are is drawn by the seed.

    local: each rank is given its loader's samples; else all are given all
    """

    bags: str
    mask: str = "synthetic"
    samples: tuple[int, ...] = (3, 2)
    seed: int = 0
    local: bool = True
    dtype: torch.dtype = torch.float64
    checkpointing: bool = False
    fsdp: bool = False
    moved: bool = False
    """Whether each step has the sizes of the first, loaded by the next ranks."""
    planner: str = "dbsp"
    max_tokens: int | None = None
    model: str = "wan"
    broken: bool = False
    """Whether bags attend in other layouts than those in which tokens arrive."""

    @property
    def settings(self) -> dict[str, Any]:
        return {"topology": self.bags, "max_tokens": self.max_tokens}

    def step(self, step: int, world: int) -> tuple[list[PackedSample], list[int]]:
        """The samples, and the rank that is given each; some ranks have none."""
        rng = np.random.default_rng([self.seed, 0 if self.moved else step])
        draws = torch.Generator().manual_seed(self.seed * 100 + step)
        samples, loaders = [], []
        busy = rng.permutation(world)[: max(1, world // 2)]
        for _ in range(self.samples[step]):
            t, h, w = (int(rng.integers(low, high)) for low, high in ((1, 5), (2, 7), (2, 7)))
            text, timestep = int(rng.integers(1, 12)), torch.tensor(float(rng.integers(1, 999)))
            samples.append(drawn_sample(self.model, draws, (t, h, w), text, timestep, self.dtype))
            loaders.append((int(rng.choice(busy)) + step * self.moved) % world)
        if self.moved:
            return samples, sorted(loaders)
        order = np.argsort(loaders, kind="stable")  # as they are numbered when they are gathered
        return [samples[one] for one in order], [loaders[one] for one in order]


@by_first_rank
def alone(case: BagCase, step: int, world: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Predictions and gradients of one process, one by one."""
    samples, _ = case.step(step, world)
    with wide_floats(case.dtype):
        transformer = make_model(case.model, case.dtype)
        single = attach_single_process(transformer, {"mask": CONFIGS[case.mask]})
        expected = one_by_one(transformer, samples)
        loss_of(expected, [*range(len(samples))]).backward()
        single.detach()
    return [one.detach() for one in expected], gradients_of(transformer)


def _reversed(plan: SequencePlan, tokens: np.ndarray, bag: int) -> SequenceLayout:
    right = bag_layout(plan, tokens, bag)
    return SequenceLayout(right.rank[::-1].copy(), right.local[::-1].copy(), right.world, right.shard)


def in_bags(rank: int, world: int, case: BagCase) -> list[tuple[float, float, int]]:
    """By step: largest differences of predictions and gradients, each as a share of the largest, and this rank's
    attentions."""
    config = {"mask": CONFIGS[case.mask], "planner": case.planner} | ({} if case.local else {"bags": case.settings})
    results = []
    wrong = patch("dbsp_diffusers.bags.bag_layout", _reversed) if case.broken else nullcontext()
    with wide_floats(case.dtype), wrong:
        transformer = make_model(case.model, case.dtype)
        if case.checkpointing:
            transformer.enable_gradient_checkpointing()
        if case.fsdp:
            mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("everyone",))
            for part in (*architecture_of(transformer).blocks_of(transformer), transformer):
                fully_shard(part, mesh=mesh)
        session = dbsp_diffusers.enable(transformer, with_debug(config, case.checkpointing))
        for step in range(len(case.samples)):
            samples, loaders = case.step(step, world)
            expected, gradients = alone(case, step, world)
            transformer.zero_grad()
            calls = session.statistics()["calls"]
            if case.local:
                own = [number for number, loader in enumerate(loaders) if loader == rank]
                found = packed_forward_local(transformer, [samples[number] for number in own], bags=case.settings)
                predictions, zero = found.samples, found.zero
            else:
                own = [*range(len(samples))]
                predictions, zero = packed_forward(transformer, samples), torch.zeros(())
            (loss_of(predictions, own) + zero).backward()
            dbsp_diffusers.sum_gradients(transformer)
            summed = gradients_of(transformer)
            assert summed.keys() == gradients.keys()
            of_predictions = apart(predictions, [expected[number] for number in own]) if own else 0.0
            of_gradients = apart(summed.values(), gradients.values())
            results.append((of_predictions, of_gradients, int(session.statistics()["calls"] - calls)))
        dbsp_diffusers.disable(transformer)
    return results


def _sample(*thw: int) -> PackedSample:
    t, h, w = thw
    return PackedSample(torch.randn(4, t, 2 * h, 2 * w), torch.tensor(500.0), torch.randn(3, 16))


def groups_of_attention(rank: int, world: int, bags: str) -> tuple[list[int], list[int]]:
    """Ranks of the group in which a bag attends, and of the one that distributes sequences."""
    transformer = make_tiny_transformer("wan")
    session = dbsp_diffusers.enable(transformer, {"mask": CONFIGS["dense"]})
    found = packed_forward_local(transformer, [_sample(1, 4, 6)], bags=bags)
    assert found.session is not None
    groups = [dist.get_process_group_ranks(one.group.group) for one in (found.session, session)]
    packed_forward_local(transformer, [_sample(2, 4, 6)], bags=bags)
    again = packed_forward_local(transformer, [_sample(1, 4, 6)], bags=bags)
    assert again.session is found.session, "groups and sessions are made once"
    dbsp_diffusers.disable(transformer)
    return groups[0], groups[1]


def tokens_held(rank: int, world: int, bags: dict[str, Any]) -> int:
    """The most tokens of a rank."""
    transformer = make_tiny_transformer("wan")
    dbsp_diffusers.enable(transformer, {"mask": CONFIGS["dense"]})
    own = [[_sample(1, 4, 6)], [_sample(1, 4, 6)], [_sample(4, 4, 6)], []][rank]
    plan = packed_forward_local(transformer, own, bags=bags).plan
    dbsp_diffusers.disable(transformer)
    assert plan is not None
    return int(plan.runs.by_rank(world).max())


def bad_bags(rank: int, world: int, kind: str) -> None:
    """Each of these raises on all ranks, and leaves them together."""
    transformer = make_tiny_transformer("wan")
    bags: Any = {
        "ranks": "g3n1",
        "text": "two",
        "differ": "g1n2" if rank else "g2n1",
        "too long": {"topology": "g1n2", "max_tokens": 20},
        "strategy": "g2n2",
        "enable": "g3n1",
    }[kind]
    config: dict[str, Any] = {"mask": CONFIGS["dense"]}
    config |= {"strategy": "U4R1"} if kind == "strategy" else {}
    try:
        dbsp_diffusers.enable(transformer, config | ({"bags": bags} if kind == "enable" else {}))
        packed_forward_local(transformer, [_sample(1, 4, 6)], bags=bags)
    finally:
        dist.barrier()
        dbsp_diffusers.disable(transformer)


def int8_in_bags(rank: int, world: int, case: BagCase) -> tuple[float, str]:
    """Samples that are sent as int8 in their bags: largest difference of predictions, as a share of the largest.

    And what is said where gradients are wanted.
    """
    config = {"mask": CONFIGS[case.mask], "precision": "int8"}
    with wide_floats(case.dtype):
        transformer = make_model(case.model, case.dtype)
        dbsp_diffusers.enable(transformer, config)
        samples, loaders = case.step(0, world)
        mine = [one for one, loader in enumerate(loaders) if loader == rank]
        expected, _ = alone(case, 0, world)
        try:
            packed_forward_local(transformer, [samples[one] for one in mine], bags=case.settings)
            said = "nothing was raised"
        except ValueError as error:
            said = str(error)
        with torch.no_grad():
            found = packed_forward_local(transformer, [samples[one] for one in mine], bags=case.settings).samples
    pairs = [(a, expected[one]) for a, one in zip(found, mine, strict=True)]
    return max((float((a - b).abs().max() / b.abs().max()) for a, b in pairs), default=0.0), said
