"""Training through dual-balanced attention: FSDP2, LoRA, autocast, and what is rejected."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import dbsp_diffusers
from dbsp_core.runtime import session as sessions
from tests.diffusers.models.model_cases import MASKS
from tests.support.gradients import gradients_of, shard_fully
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.outcomes import share_apart
from tests.support.references import by_first_rank
from tests.support.single_process import attach_single_process
from tests.support.workers import assert_all_raise

BATCH = 2


def _loss(model: Any, first: int = 0, count: int = BATCH) -> torch.Tensor:
    """Returns the mean loss of some of a batch's samples, each at a timestep of its own."""
    batch = tiny_inputs("wan", batch=BATCH) | {"timestep": torch.tensor([300.0, 800.0])}
    inputs = {name: one[first : first + count] if torch.is_tensor(one) else one for name, one in batch.items()}
    return F.mse_loss(model(**inputs)[0], torch.tanh(inputs["hidden_states"].flip(-1)))


def _config(mask: str, strategy: str | None = None) -> dict[str, Any]:
    return {"mask": MASKS[mask], **({"strategy": strategy} if strategy else {})}


@by_first_rank
def expected_gradients(mask: str, lora: bool) -> dict[str, torch.Tensor]:
    transformer = _with_lora() if lora else make_tiny_transformer("wan").train()
    attach_single_process(transformer, _config(mask))
    _loss(transformer).backward()
    return gradients_of(transformer)


def summed_gradients(transformer: Any, *batch: int) -> dict[str, torch.Tensor]:
    """Returns the sums over ranks of a step's gradients, and disables db-SP. batch: this rank's, if not the whole"""
    _loss(transformer, *batch).backward()
    dbsp_diffusers.sum_gradients(transformer)
    found = gradients_of(transformer)
    dbsp_diffusers.disable(transformer)
    return found


def gradients_under_fsdp(rank: int, world: int, mask: str, settings: dict[str, Any]) -> None:
    """Shards parameters over two groups that share a sequence each, under checkpoints."""
    expected, data = expected_gradients(mask, False), world // 2
    mesh = init_device_mesh("cpu", (data, 2), mesh_dim_names=("data", "sequence"))
    transformer = make_tiny_transformer("wan").train()
    transformer.enable_gradient_checkpointing()
    shard_fully(transformer, mesh)
    dbsp_diffusers.enable(transformer, _config(mask) | settings, group=mesh["sequence"].get_group())
    mine = BATCH // data
    found = summed_gradients(transformer, mesh["data"].get_local_rank() * mine, mine)
    assert found.keys() == expected.keys()
    assert share_apart(found.values(), expected.values()) <= 1e-5


@pytest.mark.parametrize(
    ("mask", "settings"),
    [("synthetic", {}), ("sparge", {"strategy": "U1R2", "plan": "current", "keys": "needed"})],
    ids=["all keys", "needed keys"],
)
def test_fsdp2_has_one_process_gradients(pool, mask, settings):
    pool(4).run(gradients_under_fsdp, mask, settings)


def _with_lora() -> Any:
    """Returns a transformer with adapters whose second half is not zero, so that all of them have gradients."""
    from peft import LoraConfig

    transformer = make_tiny_transformer("wan").requires_grad_(False).train()
    torch.manual_seed(3)
    projections = ["to_q", "to_k", "to_v", "to_out.0"]
    transformer.add_adapter(LoraConfig(r=4, target_modules=projections, init_lora_weights=False))
    return transformer


def gradients_of_lora(rank: int, world: int) -> None:
    expected, transformer = expected_gradients("sparge", True), _with_lora()
    transformer.enable_gradient_checkpointing()
    dbsp_diffusers.enable(transformer, _config("sparge", "U2R1"))
    found = summed_gradients(transformer)
    assert found.keys() == expected.keys()
    assert all("lora_" in name for name in found)
    assert len(found) == 2 * 2 * 2 * 4, "two matrices in four projections of two attentions a layer"
    assert share_apart(found.values(), expected.values()) <= 1e-5


def test_lora_adapters_have_one_process_gradients(pool):
    pytest.importorskip("peft")
    pool(2).run(gradients_of_lora)


def under_autocast(rank: int, world: int) -> None:
    def backward(transformer: Any) -> dict[str, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            loss = _loss(transformer)
        loss.backward()
        return gradients_of(transformer)

    expected = backward(make_tiny_transformer("wan").train())
    transformer = make_tiny_transformer("wan").train()
    dbsp_diffusers.enable(transformer, {"mask": {"source": "dense"}})
    given: set[tuple[torch.dtype, bool]] = set()
    attend = sessions.attend

    def watched(prepared: Any, q: torch.Tensor, *others: Any) -> torch.Tensor:
        given.add((q.dtype, torch.is_autocast_enabled("cpu")))
        return attend(prepared, q, *others)

    with patch.object(sessions, "attend", watched):
        backward(transformer)
    assert given == {(torch.bfloat16, False)}, "nothing within attention is cast"
    dbsp_diffusers.sum_gradients(transformer)
    assert share_apart(gradients_of(transformer).values(), expected.values()) <= 0.02
    dbsp_diffusers.disable(transformer)


def test_autocast_casts_what_attention_is_given(pool):
    pool(2).run(under_autocast)


def by_step(rank: int, world: int, training: bool) -> None:
    """Runs a pass with a dense step at the start, which is of a denoising."""
    transformer = make_tiny_transformer("wan").train(training)
    config = {**_config("synthetic"), "dense_schedule": {"first_steps": 1}}
    dbsp_diffusers.enable(transformer, config, steps=lambda: 4)
    try:
        _loss(transformer)
    finally:
        dbsp_diffusers.disable(transformer)


def test_masks_by_denoising_step_are_rejected_in_training(pool):
    assert_all_raise(pool, 2, "training draws timesteps at random", by_step, True)
    pool(2).run(by_step, False)
