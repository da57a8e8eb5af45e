"""Training through dual-balanced attention: the same losses on any ranks, FSDP2, LoRA, and what is rejected."""

from __future__ import annotations

import pytest
import torch

from tests.diffusers.models.model_training_cases import (
    by_step,
    gradients_of_lora,
    gradients_under_fsdp,
    losses_of_training,
    masks_are_constants,
    under_autocast,
)
from tests.support.workers import assert_all_raise


@pytest.mark.parametrize("steps", [3, pytest.param(50, marks=pytest.mark.long)])
def test_steps_have_the_same_losses_on_one_two_and_four_ranks(pool, steps):
    """Two items a step, each at a timestep of its own; on four ranks two groups of two have one item each."""
    (alone,) = pool(1).run(losses_of_training, steps, 1, "synthetic", "U1R1")
    assert alone[-1] < 0.8 * alone[0] or steps < 50, "there must be something to learn"
    runs = [(2, 2, "U1R2"), (4, 2, "U2R1")]
    for world, sequence, strategy in runs:
        for losses in pool(world).run(losses_of_training, steps, sequence, "synthetic", strategy):
            assert losses == pytest.approx(alone, abs=1e-5)


@pytest.mark.parametrize(
    ("world", "sequence", "over", "checkpointing"),
    [
        pytest.param(2, 2, "everyone", False, marks=pytest.mark.long),
        (4, 2, "hybrid", True),
        pytest.param(4, 2, "everyone", True, marks=pytest.mark.long),
        pytest.param(4, 2, "data", False, marks=pytest.mark.long),
    ],
)
def test_fsdp2_has_one_process_gradients(pool, world, sequence, over, checkpointing):
    assert max(pool(world).run(gradients_under_fsdp, sequence, over, checkpointing)) <= 1e-5


@pytest.mark.parametrize(
    ("world", "strategy", "checkpointing"),
    [(2, "U2R1", True), pytest.param(4, "U2R2", False, marks=pytest.mark.long)],
)
def test_lora_adapters_have_one_process_gradients(pool, world, strategy, checkpointing):
    pytest.importorskip("peft")
    for error, adapters, alone in pool(world).run(gradients_of_lora, strategy, checkpointing):
        assert error <= 1e-5
        assert (adapters, alone) == (2 * 2 * 2 * 4, True), "two matrices in four projections of two attentions a layer"


def test_autocast_casts_what_attention_is_given(pool):
    for dtypes, error in pool(2).run(under_autocast):
        assert dtypes == {torch.bfloat16}
        assert error <= 0.02


def test_masks_by_denoising_step_are_rejected_in_training(pool):
    assert_all_raise(pool, 2, "training draws timesteps at random", by_step, True)
    pool(2).run(by_step, False)


def test_predicted_masks_are_constants_of_backward(pool):
    assert pool(2).run(masks_are_constants) == [(True, True)] * 2
