"""Images and videos of several sizes in one call of a transformer: exactly as one by one, forward and backward."""

from __future__ import annotations

import pytest
import torch

from dbsp_diffusers.packed.forward import PACKINGS
from tests.diffusers.packed.packed_model_cases import (
    alone_is_one_by_one,
    bad_input,
    kept_by_modulation,
    make_model,
    packed_is_one_by_one,
    stock_calls_still_work,
)
from tests.support.workers import assert_all_raise

CASES = [
    # model, world, mask, strategy, local, checkpointing, fsdp
    ("wan", 1, "synthetic", "U1R1", False, False, False),
    ("wan", 2, "sparge", "U1R2", False, True, False),
    ("flux-dev", 2, "sparge", "U1R2", True, True, False),
    ("hunyuan", 2, "sparge", "U2R1", True, True, False),
]
LONG = [
    ("wan-i2v", 2, "synthetic", "U2R1", True, False, False),
    ("wan-ti2v", 2, "synthetic", "U1R2", True, False, False),
    ("hunyuan-lora", 2, "dense", "U1R2", True, False, False),
    ("wan", 3, "synthetic", "U3R1", True, False, False),
    ("wan", 4, "synthetic", "U2R2", True, True, False),
    ("wan", 4, "dense", "U1R4", False, False, False),
    ("flux-dev", 4, "dense", "U2R2", True, True, True),
]


@pytest.mark.parametrize(
    ("model", "world", "rest"),
    [
        pytest.param(model, world, rest, marks=marks)
        for cases, marks in ((CASES, ()), (LONG, pytest.mark.long))
        for model, world, *rest in cases
    ],
)
def test_packed_samples_equal_one_by_one(pool, model, world, rest):
    for predictions, gradients, partial in pool(world).run(packed_is_one_by_one, model, *rest):
        assert predictions <= 1e-12
        assert gradients <= 1e-12
        assert partial > 1e-4 or world == 1, "without the sum over ranks they are other ones"


def test_packed_samples_in_float32_equal_one_by_one(pool):
    case = ("wan", "synthetic", "U1R2", True, False, False, torch.float32)
    for predictions, gradients, _ in pool(2).run(packed_is_one_by_one, *case):
        assert max(predictions, gradients) <= 1e-5


@pytest.mark.parametrize(
    ("model", "checkpointing"),
    [("wan", True), ("wan-i2v", False), ("wan-ti2v", False), ("flux", True), ("hunyuan", False)],
)
def test_packed_samples_without_db_sp_equal_one_by_one(pool, model, checkpointing):
    (found,) = pool(1).run(alone_is_one_by_one, model, checkpointing)
    assert max(found) <= 1e-12


def test_stock_calls_between_packed_calls_are_unchanged(pool):
    for enabled, disabled, undone in pool(2).run(stock_calls_still_work):
        assert max(enabled, disabled) <= 1e-5
        assert undone


@pytest.mark.parametrize("model", ["flux", "hunyuan"])
def test_token_flops_are_those_of_its_own_stream(model):
    """Both kinds of blocks: 4·d² of projections and 8·d² of a feed-forward, two FLOP each (KnapFormer, Eq. 1)."""
    transformer = make_model(model, torch.float32)
    assert PACKINGS[type(transformer).__name__].token_flops(transformer) == 24 * (6 * 24) ** 2


def test_modulation_keeps_no_row_for_every_token(pool):
    (found,) = pool(1).run(kept_by_modulation)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("channels", "latents must be [4, frames, height, width]"),
        ("patches", "do not divide into patches"),
        ("text", "text must be [tokens, 16]"),
        ("timestep", "one a token"),
        ("image", "image embeddings are not for this model"),
        ("pooled", "sample 0: the pooled text embedding is missing"),
        ("guidance", "sample 0: the guidance scale is missing"),
        ("frames", "sample 0: latents must have one frame"),
        ("dtype", "text embeddings are of dtypes"),
        ("none", "no rank was given a sample"),
        ("empty", "given no samples"),
        (
            "model",
            "HunyuanVideo15Transformer3DModel takes one size at a time; several take WanTransformer3DModel, Flux",
        ),
        ("not enabled", "call dbsp_diffusers.enable first"),
    ],
)
def test_bad_input_is_rejected_on_all_ranks(pool, kind, message):
    assert_all_raise(pool, 2, message, bad_input, kind)
