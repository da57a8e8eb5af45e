"""A Wan with TurboWan's projections of SLA's linear branch, put in by hand or read from a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dbsp_diffusers
from dbsp_core.utils.errors import UserError
from tests.support.models.gated_wan import add_to_checkpoint
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.outcomes import alone, apart, assert_near, outputs

SLA = {"source": "sla", "topk": 0.3, "block_q": 16, "block_k": 16}
THW = (3, 5, 7)
TURBOWAN = "blocks.{}.attn1.attn_op.local_attn.proj_l"
"""What TurboWan's checkpoints in diffusers' layout call the layer of a block."""


def projections(transformer: Any) -> list[dict[str, torch.Tensor]]:
    """Returns weight and bias of each block's projection, of a head's channels."""
    generator, attention = torch.Generator().manual_seed(5), transformer.blocks[0].attn1
    width = attention.to_q.out_features // attention.heads
    sizes = {"weight": (width, width), "bias": (width,)}
    return [{part: torch.randn(size, generator=generator) for part, size in sizes.items()} for _ in transformer.blocks]


def put_projections(transformer: Any) -> Any:
    for block, weights in zip(transformer.blocks, projections(transformer), strict=True):
        layer = nn.utils.skip_init(nn.Linear, *weights["weight"].shape)
        layer.load_state_dict(weights)
        block.attn1.proj_l = layer
    return transformer


def run(rank: int, world: int, loaded: list[Any], expected: Any, plain: Any) -> None:
    """Compares ranks that have a transformer each with one process."""
    transformer = loaded[rank]
    dbsp_diffusers.enable(transformer, {"mask": SLA, "strategy": "U2R2"})
    assert transformer.blocks[0].attn1.proj_l.weight.dtype == torch.float32
    with torch.no_grad():
        assert_near(outputs(transformer, tiny_inputs("wan", THW, 2)), expected, plain)
    dbsp_diffusers.disable(transformer)
    assert not hasattr(transformer.blocks[0].attn1, "proj_l")


def test_projections_of_a_checkpoint_equal_those_put_in_by_hand(threads, tmp_path):
    from diffusers import WanTransformer3DModel

    stock = make_tiny_transformer("wan")
    stock.save_pretrained(tmp_path)
    names = {
        f"{TURBOWAN.format(number)}.{part}": value
        for number, weights in enumerate(projections(stock))
        for part, value in weights.items()
    }
    add_to_checkpoint(tmp_path, names)
    expected, plain = (
        alone(put_projections(stock), tiny_inputs("wan", THW, 2), {"mask": SLA | {"linear": linear}})
        for linear in (True, False)
    )
    assert apart(plain, expected) > 1e-3, "the branch must matter"
    loaded = [WanTransformer3DModel.from_pretrained(tmp_path, local_files_only=True) for _ in range(4)]
    threads(4).run(run, loaded, expected, plain)


def test_a_projection_of_another_size_is_rejected(tmp_path):
    from diffusers import WanTransformer3DModel

    stock = make_tiny_transformer("wan")
    stock.save_pretrained(tmp_path)
    add_to_checkpoint(tmp_path, {f"{TURBOWAN.format(number)}.weight": torch.zeros(3, 3) for number in range(2)})
    transformer = WanTransformer3DModel.from_pretrained(tmp_path, local_files_only=True)
    with pytest.raises(UserError, match=r"proj_l.weight is torch.float32 of shape \[3, 3\].*linear: fal"):
        dbsp_diffusers.enable(transformer, {"mask": SLA})
