"""What the workers run: training of tiny transformers, sequence parallel × data parallel, FSDP2 and LoRA."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import dbsp_diffusers
from dbsp_core.runtime import session as sessions
from tests.diffusers.models.model_cases import MASKS
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.references import by_first_rank
from tests.support.single_process import attach_single_process

BATCH = 2


def _item(step: int, item: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Inputs of one sample, at a timestep of its own, and what is to come out."""
    inputs = tiny_inputs("wan", seed=step * BATCH + item + 1)
    draws = torch.Generator().manual_seed(1000 + step * BATCH + item)
    inputs["timestep"] = torch.randint(1, 1000, (1,), generator=draws)
    return inputs, torch.tanh(inputs["hidden_states"].flip(-1))


def _batch(step: int, first: int, count: int) -> tuple[dict[str, Any], torch.Tensor]:
    inputs, wanted = zip(*(_item(step, first + item) for item in range(count)), strict=True)
    joined = {
        name: torch.cat([one[name] for one in inputs]) if isinstance(value, torch.Tensor) else value
        for name, value in inputs[0].items()
    }
    return joined, torch.cat(wanted)


def _loss(model: Any, step: int, first: int = 0, count: int = BATCH) -> torch.Tensor:
    inputs, wanted = _batch(step, first, count)
    return F.mse_loss(model(**inputs)[0], wanted)


def _config(mask: str, strategy: str | None = None) -> dict[str, Any]:
    return {"mask": MASKS[mask], **({"strategy": strategy} if strategy else {})}


def losses_of_training(rank: int, world: int, steps: int, sequence: int, mask: str, strategy: str) -> list[float]:
    """Steps of AdamW over groups of `sequence` ranks, the rest data parallel by DDP. Returns each step's loss."""
    mesh = init_device_mesh("cpu", (world // sequence, sequence), mesh_dim_names=("data", "sequence"))
    data, mine = mesh["data"].get_group(), BATCH // (world // sequence)
    transformer = make_tiny_transformer("wan").train()
    if sequence > 1:
        dbsp_diffusers.enable(transformer, _config(mask, strategy), group=mesh["sequence"].get_group())
        undo = dbsp_diffusers.disable
    else:
        attached = attach_single_process(transformer, _config(mask))
        undo = lambda _: attached.detach()  # noqa: E731
    model = DistributedDataParallel(transformer, process_group=data) if data.size() > 1 else transformer
    optimizer = torch.optim.AdamW(transformer.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        loss = _loss(model, step, mesh["data"].get_local_rank() * mine, mine)
        optimizer.zero_grad()
        loss.backward()
        if sequence > 1:
            dbsp_diffusers.sum_gradients(transformer)
        optimizer.step()
        total = loss.detach() / data.size()
        dist.all_reduce(total, group=data)
        losses.append(float(total))
    undo(transformer)
    return losses


def _gradients(transformer: Any) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in transformer.named_parameters() if p.grad is not None}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}


@by_first_rank
def _expected(mask: str, lora: bool = False) -> dict[str, torch.Tensor]:
    transformer = _with_lora() if lora else make_tiny_transformer("wan").train()
    attached = attach_single_process(transformer, _config(mask))
    _loss(transformer, 0).backward()
    attached.detach()
    return _gradients(transformer)


def _largest_difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """As a share of the largest gradient."""
    assert found.keys() == expected.keys()
    largest = max(float(grad.abs().max()) for grad in expected.values())
    return max(float((found[name] - grad).abs().max()) for name, grad in expected.items()) / largest


def gradients_under_fsdp(rank: int, world: int, sequence: int, over: str, checkpointing: bool) -> float:
    """FSDP2 on each block and on the whole.

    over: the ranks that parameters are sharded over: "everyone", "data" and the sequence, or "hybrid", sharded over
    the sequence's ranks and copied over the data's
    """
    expected = _expected("synthetic")
    data = world // sequence
    mesh = init_device_mesh("cpu", (data, sequence), mesh_dim_names=("data", "sequence"))
    everyone = init_device_mesh("cpu", (world,), mesh_dim_names=("everyone",))
    sharded: DeviceMesh = {"everyone": everyone, "data": mesh["data"], "hybrid": mesh}[over]
    transformer = make_tiny_transformer("wan").train()
    if checkpointing:
        transformer.enable_gradient_checkpointing()
    for block in transformer.blocks:
        fully_shard(block, mesh=sharded)
    fully_shard(transformer, mesh=sharded)
    dbsp_diffusers.enable(transformer, _config("synthetic"), group=mesh["sequence"].get_group())
    mine = BATCH // data
    _loss(transformer, 0, mesh["data"].get_local_rank() * mine, mine).backward()
    dbsp_diffusers.sum_gradients(transformer)
    found = _gradients(transformer)
    dbsp_diffusers.disable(transformer)
    return _largest_difference(found, expected)


def _with_lora() -> Any:
    """Adapters whose second half is not zero, so that all of them have gradients."""
    from peft import LoraConfig

    transformer = make_tiny_transformer("wan").requires_grad_(False).train()
    torch.manual_seed(3)
    transformer.add_adapter(
        LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights=False)
    )
    return transformer


def gradients_of_lora(rank: int, world: int, strategy: str, checkpointing: bool) -> tuple[float, int, bool]:
    """(difference, parameters with gradients, whether only adapters have them)"""
    expected = _expected("sparge", True)
    transformer = _with_lora()
    if checkpointing:
        transformer.enable_gradient_checkpointing()
    dbsp_diffusers.enable(transformer, _config("sparge", strategy))
    _loss(transformer, 0).backward()
    dbsp_diffusers.sum_gradients(transformer)
    found = _gradients(transformer)
    dbsp_diffusers.disable(transformer)
    return _largest_difference(found, expected), len(found), all("lora_" in name for name in found)


def under_autocast(rank: int, world: int) -> tuple[set[torch.dtype], float]:
    """(dtypes of q, k and v that attention is given, largest difference of gradients from stock diffusers')"""

    def gradients(transformer: Any) -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = _loss(transformer, 0)
        loss.backward()
        return _gradients(transformer)

    expected = gradients(make_tiny_transformer("wan").train())
    transformer = make_tiny_transformer("wan").train()
    session = dbsp_diffusers.enable(transformer, {"mask": {"source": "dense"}})
    given: set[torch.dtype] = set()
    attend = sessions.attend

    def watched(prepared: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> torch.Tensor:
        given.update(t.dtype for t in (q, k, v))
        assert not torch.is_autocast_enabled("cpu"), "nothing within attention is cast"
        return attend(prepared, q, k, v, *options)

    with patch.object(sessions, "attend", watched):
        gradients(transformer)
    assert session.statistics()["calls"] == session.layers
    dbsp_diffusers.sum_gradients(transformer)
    found = _gradients(transformer)
    dbsp_diffusers.disable(transformer)
    return given, _largest_difference(found, expected)


def by_step(rank: int, world: int, training: bool) -> None:
    """Dense steps at the start are of a denoising."""
    transformer = make_tiny_transformer("wan").train(training)
    config = {**_config("synthetic"), "dense_schedule": {"first_steps": 1}}
    dbsp_diffusers.enable(transformer, config, steps=lambda: 4)
    try:
        _loss(transformer, 0)
    finally:
        dbsp_diffusers.disable(transformer)


def masks_are_constants(rank: int, world: int) -> tuple[bool, bool]:
    """Whether a mask source is asked without autograd, and whether q and k have gradients all the same."""
    asked: list[bool] = []
    transformer = make_tiny_transformer("wan").train()
    session = dbsp_diffusers.enable(transformer, _config("sparge"))
    source = type(session.config.mask)
    mask = source.mask

    def watched(self: Any, *args: Any) -> Any:
        asked.append(torch.is_grad_enabled())
        return mask(self, *args)

    source.mask = watched
    try:
        _loss(transformer, 0).backward()
    finally:
        source.mask = mask
        dbsp_diffusers.disable(transformer)
    projections = [transformer.blocks[0].attn1.to_q.weight, transformer.blocks[0].attn1.to_k.weight]
    return bool(asked) and not any(asked), all(p.grad is not None and bool(p.grad.any()) for p in projections)
