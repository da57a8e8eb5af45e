"""Activation checkpointing: passes between a forward pass and its backward leave its gradients as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.utils.checkpoint import checkpoint

import dbsp_diffusers
from dbsp_diffusers.models import architecture_of
from tests.diffusers.models.model_cases import DENSE, MASKS
from tests.support.gradients import gradients_of, loss_of, summed_over_ranks
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.outcomes import outputs, said, share_apart
from tests.support.shared import shared
from tests.support.single_process import attach_single_process

SIZES = (3, 4, 5), (2, 3, 4)
PLANS = {"dense": DENSE, "sparge": {"mask": MASKS["sparge"], "strategy": "U1R2"}}


def two_passes(model: str, differ: str) -> list[dict[str, Any]]:
    """Returns the inputs of two passes, which differ in the size of the video, or in the length of the prompt."""
    if differ == "size":
        return [tiny_inputs(model, size, seed=seed) for seed, size in enumerate(SIZES, 10)]
    return [_shorter(tiny_inputs(model, SIZES[0], seed=10), tokens) for tokens in (1, 2)]


def _shorter(inputs: dict[str, Any], tokens: int) -> dict[str, Any]:
    """Returns inputs whose prompt has so many tokens less."""
    name = next(name for name in ("encoder_attention_mask", "encoder_hidden_states_mask") if name in inputs)
    mask = inputs[name].clone()
    mask[:, mask[0].long().nonzero().flatten()[-tokens:]] = 0
    return inputs | {name: mask}


def _loss(transformer: Any, inputs: dict[str, Any]) -> torch.Tensor:
    parts = outputs(transformer, inputs)
    return loss_of(parts, range(len(parts)))


@shared
def one_process(model: str, mask: str, differ: str, passes: int) -> dict[str, torch.Tensor]:
    """Returns the gradients of one process without checkpoints, one pass after the other."""
    transformer = make_tiny_transformer(model).train()
    attached = attach_single_process(transformer, {"mask": PLANS[mask]["mask"]})
    for inputs in two_passes(model, differ)[:passes]:
        _loss(transformer, inputs).backward()
    attached.detach()
    return {name: gradient.clone() for name, gradient in gradients_of(transformer).items()}


def by_diffusers(transformer: Any, reentrant: bool) -> None:
    transformer.enable_gradient_checkpointing(functools.partial(checkpoint, use_reentrant=reentrant))


def by_wrappers(transformer: Any, reentrant: bool) -> None:
    """Puts torch's wrapper around each block, as trainers do."""
    impl = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    blocks = architecture_of(transformer).blocks_of(transformer)
    wrap = functools.partial(checkpoint_wrapper, checkpoint_impl=impl)
    apply_activation_checkpointing(transformer, checkpoint_wrapper_fn=wrap, check_fn=lambda part: part in blocks)


def train(
    rank: int,
    world: int,
    case: tuple[str, str, str, str, bool],
    put: Callable[[Any, bool], None] = by_diffusers,
    later: bool = False,
) -> float:
    """Returns the error of gradients, as a share of the largest, where another pass runs before backward.

    case: model, masks, in what passes differ, what the second pass runs under, reentrant checkpoints
    later: True if checkpointing is turned on after db-SP is enabled
    """
    model, mask, differ, between, reentrant = case
    transformer, (first, second) = make_tiny_transformer(model).train(), two_passes(model, differ)
    if not later:
        put(transformer, reentrant)
    dbsp_diffusers.enable(transformer, PLANS[mask])
    if later:
        put(transformer, reentrant)
    losses = [_loss(transformer, first)]
    if between in ("no_grad", "inference_mode"):
        with getattr(torch, between)():
            outputs(transformer, second)
    else:
        losses.append(_loss(transformer, second))
    for loss in losses[:: -1 if between == "last first" else 1]:
        loss.backward()
    found = {name: summed_over_ranks(gradient) for name, gradient in gradients_of(transformer).items()}
    expected = one_process(model, mask, differ, len(losses))
    dbsp_diffusers.disable(transformer)
    names = [name.replace("_checkpoint_wrapped_module.", "") for name in found]
    assert set(expected) <= set(names)  # reentrant checkpoints give zeros to parameters that are not used
    zeros = [expected.get(name, torch.zeros_like(grad)) for name, grad in zip(names, found.values(), strict=True)]
    return share_apart(found.values(), zeros)


@pytest.mark.parametrize(
    "case",
    [
        ("qwen", "dense", "prompt", "no_grad", True),
        ("z-image", "dense", "size", "last first", False),
        ("framepack", "dense", "size", "first first", False),
        ("ltx2", "dense", "size", "inference_mode", False),
        ("wan", "sparge", "size", "last first", True),
    ],
    ids=lambda case: "-".join(map(str, case)),
)
def test_pass_before_backward_leaves_gradients_as_they_are(threads, case):
    assert max(threads(2).run(train, case)) <= 1e-5


@pytest.mark.parametrize(
    ("put", "reentrant", "later"),
    [(by_diffusers, False, True), (by_wrappers, False, False), (by_wrappers, True, True)],
    ids=["turned_on later", "wrapper", "wrapper later"],
)
def test_checkpoints_put_on_otherwise_give_equal_gradients(threads, put, reentrant, later):
    case = ("hunyuan", "sparge", "size", "first first", reentrant)
    assert max(threads(2).run(train, case, put, later)) <= 1e-5


def by_itself(transformer: Any, reentrant: bool) -> None:
    """Puts checkpoints around blocks that db-SP cannot follow."""
    for block in architecture_of(transformer).blocks_of(transformer):
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=reentrant)


def unknown_checkpoints(rank: int, world: int) -> tuple[str, str]:
    """Returns what backward says after one pass, and after two of different size, with such checkpoints."""
    transformer, (first, second) = make_tiny_transformer("krea2").train(), two_passes("krea2", "size")
    dbsp_diffusers.enable(transformer, PLANS["sparge"])
    by_itself(transformer, False)
    loss = _loss(transformer, first)
    with torch.no_grad():
        outputs(transformer, second)
    alone = said(loss.backward)
    losses = [_loss(transformer, inputs) for inputs in (first, second)]
    several = said(losses[0].backward)
    del transformer.__dict__["_dbsp"]  # its blocks cannot be made as they were
    return alone, several


def test_checkpoints_that_are_not_followed_raise_where_passes_cannot_be_told_apart(threads):
    for alone, several in threads(2).run(unknown_checkpoints):
        assert alone == "nothing"
        assert several.startswith("UserError: 2 forward passes of different sizes or masks wait for backward")


def disabled_before_backward(rank: int, world: int) -> str:
    transformer = make_tiny_transformer("wan").train()
    transformer.enable_gradient_checkpointing()
    functions = [vars(part).get("_gradient_checkpointing_func") for part in transformer.modules()]
    dbsp_diffusers.enable(transformer, PLANS["dense"])
    loss = _loss(transformer, tiny_inputs("wan"))
    dbsp_diffusers.disable(transformer)
    now = [vars(part).get("_gradient_checkpointing_func") for part in transformer.modules()]
    assert all(one is other for one, other in zip(functions, now, strict=True))
    return said(loss.backward)


def test_disable_before_backward_is_an_error(threads):
    for answer in threads(2).run(disabled_before_backward):
        assert "call backward() before `disable`" in answer


def recomputed(rank: int, world: int, model: str, config: dict[str, Any], inputs: dict[str, Any]) -> float:
    """Returns the error of gradients under checkpoints. A Wan trains its feed-forward layers alone."""
    found = []
    for checkpointing in (False, True):
        transformer = make_tiny_transformer(model).train()
        if model == "wan":
            transformer.requires_grad_(False)
            for block in transformer.blocks:
                block.ffn.requires_grad_(True)
        if checkpointing:
            transformer.enable_gradient_checkpointing()
        dbsp_diffusers.enable(transformer, config)
        _loss(transformer, inputs).backward()
        found.append(gradients_of(transformer))
        dbsp_diffusers.disable(transformer)
    return share_apart(found[1].values(), found[0].values())


@pytest.mark.parametrize(
    ("model", "plan", "inputs"),
    [
        ("wan", "sparge", tiny_inputs("wan")),  # the first block needs no gradients, but is computed again
        ("ernie-image", "dense", tiny_inputs("ernie-image", batch=3) | {"text_lens": torch.tensor([9, 6, 9])}),
    ],
    ids=["frozen attention", "a pass for each prompt length"],
)
def test_checkpoints_change_no_gradient(threads, model, plan, inputs):
    assert max(threads(2).run(recomputed, model, PLANS[plan], inputs)) <= 1e-6
