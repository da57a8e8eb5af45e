"""Images and videos of several sizes in one call of a transformer: exactly as one by one, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dbsp_diffusers
from dbsp_diffusers import PackedSample, packed_forward, packed_forward_local
from dbsp_diffusers.packed.passes import scaled
from tests.diffusers.packed.packed_model_cases import PackedCase, compare, one_by_one
from tests.support.models.tiny_transformers import make_tiny_transformer
from tests.support.outcomes import share_apart
from tests.support.workers import assert_all_raise


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("world", "case"),
    [
        (2, PackedCase(mask="sparge", strategy="U1R2", local=False, checkpointing=True)),
        (2, PackedCase(model="flux-dev", mask="sparge", strategy="U1R2", checkpointing=True)),
        (2, PackedCase(model="hunyuan", mask="sparge", strategy="U2R1", checkpointing=True, brief=True)),
        long(2, PackedCase(model="wan-i2v", strategy="U2R1")),
        long(2, PackedCase(model="wan-ti2v", strategy="U1R2")),
        long(2, PackedCase(model="hunyuan-lora", mask="dense", strategy="U1R2")),
        long(4, PackedCase(strategy="U2R2", checkpointing=True)),
        long(4, PackedCase(model="flux-dev", mask="dense", strategy="U2R2", checkpointing=True, fsdp=True)),
    ],
    ids=lambda value: f"{value.model} {value.strategy}" if isinstance(value, PackedCase) else str(value),
)
def test_packed_samples_equal_one_by_one(pool, world, case):
    pool(world).run(compare, case)


@torch.no_grad()
def stock_calls_between(rank: int, world: int) -> None:
    """Interleaves packed calls and stock ones, which leave no trace."""
    samples, _ = PackedCase(dtype=torch.float32).step(0, 1)
    transformer = make_tiny_transformer("wan")
    before = set(vars(transformer)) | set(vars(transformer.blocks[0]))
    expected = one_by_one(transformer, samples)
    dbsp_diffusers.enable(transformer, {"mask": {"source": "dense"}})
    for found in (
        packed_forward(transformer, samples),
        one_by_one(transformer, samples),
        packed_forward(transformer, samples[::-1])[::-1],
    ):
        assert share_apart(found, expected) <= 1e-5
    dbsp_diffusers.disable(transformer)
    assert set(vars(transformer)) | set(vars(transformer.blocks[0])) == before


def test_stock_calls_between_packed_calls_are_unchanged(pool):
    pool(2).run(stock_calls_between)


def test_modulation_keeps_no_row_for_every_token():
    """Expects autograd to keep no more elements of a modulation, next to its input, than the few rows have."""
    kept: list[int] = []
    x = torch.randn(1, 1000, 8, requires_grad=True)
    rows = torch.randn(3, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(0 if t is x else t.numel()) or t, lambda t: t):
        scaled(x, rows, torch.arange(1000) % 3).sum().backward()
    assert max(one for one in kept if one != 1000) == rows.numel()


MODELS = {"model": "hunyuan1.5", "pooled": "hunyuan", "guidance": "hunyuan", "frames": "flux"}


def bad_input(rank: int, world: int, kind: str) -> None:
    """Gives the last rank a wrong sample; each of these raises on all ranks, and leaves them together."""
    model = MODELS.get(kind, "wan")
    transformer = make_tiny_transformer(model)
    one = PackedCase(model="wan" if kind == "model" else model, dtype=torch.float32).step(0, 1)[0][0]
    if kind != "not enabled":
        dbsp_diffusers.enable(transformer, {"mask": {"source": "dense"}})
    changed: dict[str, dict[str, Any]] = {
        "channels": {"latents": one.latents[:2]},
        "text": {"text": one.text[:, :3]},
        "timestep": {"timestep": torch.arange(7)},
        "pooled": {"pooled": None},
        "guidance": {"guidance": None},
        "frames": {"latents": torch.cat([one.latents] * 2, 1)},
        "dtype": {"text": one.text.bfloat16()},
    }
    wrong: list[PackedSample] = [replace(one, **changed.get(kind, {}))]
    try:
        if kind == "empty":
            packed_forward(transformer, [])
        else:
            packed_forward_local(transformer, [] if kind == "none" else wrong if rank == world - 1 else [one])
    finally:
        dist.barrier()
        dbsp_diffusers.disable(transformer)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("channels", "latents must be [4, frames, height, width]"),
        ("text", "text must be float[tokens, 16]"),
        ("timestep", "one a token"),
        ("pooled", "sample 0: the pooled text embedding is missing"),
        ("guidance", "sample 0: the guidance scale is missing"),
        ("frames", "sample 0: latents of this image model must have one frame"),
        ("dtype", "text embeddings must share a dtype"),
        ("none", "no rank has a sample"),
        ("empty", "needs at least one sample"),
        (
            "model",
            "HunyuanVideo15Transformer3DModel does not support several sizes in one call; use WanTransformer3DModel",
        ),
        ("not enabled", "call dbsp_diffusers.enable first"),
    ],
)
def test_bad_input_is_rejected_on_all_ranks(pool, kind, message):
    assert_all_raise(pool, 2, message, bad_input, kind)
