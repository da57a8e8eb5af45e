"""What the simulated node runs: samples of several sizes in one call or in bags, against one by one on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

import dbsp_diffusers
from dbsp_diffusers import PackedSample, packed_forward, packed_forward_local
from tests.diffusers.packed.packed_model_cases import apart, drawn_sample, gradients_of, loss_of, one_by_one
from tests.gpu_node.faults import recorded
from tests.simulated.model_cases import MASKS, brief, own_device, summed_over_ranks
from tests.support.shared import shared
from tests.support.single_process import attach_single_process

SIZES = (((2, 3, 3), 9), ((1, 2, 4), 5), ((1, 2, 2), 3))
"""Token grids, and tokens of text: four blocks, with or without text."""


@dataclass(frozen=True)
class PackedCase:
    """A packed call. loaders: the rank that is given each sample; empty: all are given all."""

    model: str = "wan"
    mask: str = "static"
    strategy: str | None = None
    loaders: tuple[int, ...] = ()
    bags: str | None = None
    gradients: bool = False


def samples_of(model: str, device: torch.device | None = None) -> list[PackedSample]:
    draws = torch.Generator().manual_seed(0)
    made = [
        drawn_sample(model, draws, thw, text, torch.tensor(100.0 + 200 * index), torch.float32)
        for index, (thw, text) in enumerate(SIZES)
    ]
    return made if device is None else [_moved(sample, device) for sample in made]


def _moved(sample: PackedSample, device: torch.device) -> PackedSample:
    names = ("latents", "timestep", "text", "image", "pooled")
    return replace(sample, **{name: _to(getattr(sample, name), device) for name in names})


def _to(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value


@shared
def one_by_one_on_one_process(model: str, mask: str) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Predictions and gradients."""
    transformer = brief(model).train()
    attach_single_process(transformer, {"mask": MASKS[mask]})
    expected = one_by_one(transformer, samples_of(model))
    loss_of(expected, [*range(len(expected))]).backward()
    return [one.detach() for one in expected], gradients_of(transformer)


def packed_on_gpus(rank: int, world: int, case: PackedCase) -> tuple[float, float]:
    """Returns the largest differences of predictions and of gradients, each as a share of the largest value."""
    device = own_device(rank)
    expected, gradients = one_by_one_on_one_process(case.model, case.mask)
    transformer, samples = brief(case.model).train().to(device), samples_of(case.model, device)
    config = {"mask": MASKS[case.mask], "strategy": case.strategy, "bags": case.bags}
    dbsp_diffusers.enable(transformer, {name: value for name, value in config.items() if value is not None})
    own = [one for one in range(len(samples)) if not case.loaders or case.loaders[one] == rank]
    with torch.set_grad_enabled(case.gradients):
        if case.loaders:
            found = packed_forward_local(transformer, [samples[one] for one in own])
            predictions, zero = found.samples, found.zero
        else:
            predictions, zero = packed_forward(transformer, samples), torch.zeros((), device=device)
    if case.gradients:
        (loss_of(predictions, own).to(device) + zero).backward()
    dbsp_diffusers.disable(transformer)
    of_predictions = _apart(predictions, [expected[one] for one in own]) if own else 0.0
    if not case.gradients:
        return of_predictions, 0.0
    found = gradients_of(transformer)
    assert found.keys() == gradients.keys()
    return of_predictions, _apart([summed_over_ranks(found[name]) for name in gradients], gradients.values())


def _apart(found: Any, expected: Any) -> float:
    return apart([one.detach().cpu() for one in found], expected)


def steady_waits(rank: int, world: int, model: str, bags: str | None) -> dict[str, int]:
    """Returns the host waits in the product's packages, by line of code, of the third of three packed calls."""
    device = own_device(rank)
    transformer, samples = brief(model).to(device), samples_of(model, device)
    dbsp_diffusers.enable(transformer, {"mask": MASKS["static"]} | ({} if bags is None else {"bags": bags}))
    control = dbsp_diffusers.session_of(transformer).group.control()
    with torch.no_grad():
        for timestep in (900.0, 800.0, 700.0):
            control.barrier()
            recorded.clear()
            control.barrier()
            packed_forward(transformer, samples, timestep=timestep)
    control.barrier()
    waits = recorded.waits_of_product()
    dbsp_diffusers.disable(transformer)
    return waits
