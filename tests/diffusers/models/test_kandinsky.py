"""Kandinsky 5 and 6 SR with NABLA: what the model does by itself, on several ranks; and with other masks."""

from __future__ import annotations

import functools
from typing import Any
from unittest.mock import patch

import pytest
import torch

import dbsp_diffusers
from dbsp_core.config import DbspConfig
from dbsp_core.sources import NablaSource
from dbsp_diffusers.resolve import resolve_config
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.outcomes import alone, apart, assert_near, outputs
from tests.support.settings import with_debug
from tests.support.shared import shared

MODEL, THW = "kandinsky5-nabla", (3, 16, 24)
OWN = {
    MODEL: "diffusers.models.transformers.transformer_kandinsky",
    "kandinsky6-sr": "diffusers.models.transformers.transformer_kandinsky6_sr",
}
"""Models that bring NABLA, and where they call attention."""
"""18 blocks of 64 tokens; 3 ranks share 1152 of them equally, and the heads of 2 ranks."""
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "no mask named": ({}, "own"),
    "its own, named": ({"mask": {"source": "nabla"}}, "own"),
    "in a union": (
        {"mask": {"source": "union", "of": [{"source": "nabla"}, {"source": "nabla", "window": [1, 1, 1]}]}},
        "own",
    ),
    "dense, named": ({"mask": {"source": "dense"}}, "dense"),
    "others of NABLA's numbers": ({"mask": {"source": "nabla", "cdf": 0.9}}, ""),
}
"""A configuration, and what of `references` it gives."""


@shared
def references(model: str, batch: int) -> dict[str, list[torch.Tensor]]:
    """Returns what the model gives with its own mask, and without a mask.

    Replaces flex attention, which on a CPU ignores block masks unless it is compiled: torch's own attention under
    the mask that the model made.
    """
    from torch.nn.attention.flex_attention import BlockMask

    def attend(masked: bool, query: Any, key: Any, value: Any, attn_mask: Any = None, **options: Any) -> Any:
        if isinstance(attn_mask, BlockMask):
            blocks = attn_mask.to_dense().bool()
            attn_mask = blocks.repeat_interleave(64, dim=-2).repeat_interleave(64, dim=-1) if masked else None
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask).transpose(1, 2)

    transformer, inputs = make_tiny_transformer(model), tiny_inputs(model, THW, batch)
    found = {}
    for what in ("own", "dense"):
        with torch.no_grad(), patch(f"{OWN[model]}.dispatch_attention_fn", functools.partial(attend, what == "own")):
            found[what] = outputs(transformer, inputs)
    assert apart(found["own"], found["dense"]) > 1e-2, "the mask must matter"
    return found


@pytest.mark.parametrize("model", OWN)
def test_nabla_in_one_process_equals_the_models_own(model):
    """Shows that the reference of all others is right."""
    transformer, inputs = make_tiny_transformer(model), tiny_inputs(model, THW, 2)
    for name in ("no mask named", "dense, named"):
        config, same = CONFIGS[name]
        assert_near(alone(transformer, inputs, config), references(model, 2)[same])


@torch.no_grad()
def run_nabla(rank: int, world: int, model: str, strategy: str, name: str, batch: int) -> None:
    transformer, (config, same) = make_tiny_transformer(model), CONFIGS[name]
    expected = references(model, batch)
    dbsp_diffusers.enable(transformer, with_debug(config | {"strategy": strategy}))
    found = outputs(transformer, tiny_inputs(model, THW, batch))
    dbsp_diffusers.disable(transformer)
    for what, other in expected.items():
        assert (apart(found, other) <= 1e-5) if what == same else (apart(found, other) > 1e-3), what


@pytest.mark.parametrize(
    ("model", "world", "strategy", "name", "batch"),
    [
        (MODEL, 2, "U2R1", "no mask named", 2),
        (MODEL, 4, "U2R2", "in a union", 1),
        (MODEL, 3, "U3R1", "others of NABLA's numbers", 1),
        ("kandinsky6-sr", 3, "U1R3", "its own, named", 1),
    ],
)
def test_nabla_on_several_ranks_equals_one_process_with_that_mask(threads, model, world, strategy, name, batch):
    threads(world).run(run_nabla, model, strategy, name, batch)


def settled(config):
    return resolve_config(config, make_tiny_transformer(MODEL))


def test_nabla_settings_left_out_are_the_checkpoints():
    of_checkpoint = NablaSource(cdf=0.4, window=(1, 1, 3))
    assert settled(None).mask == settled({"strategy": "U1R1"}).mask == settled("nabla").mask == of_checkpoint
    assert settled("nabla:window=[3,3,3]").mask == NablaSource(cdf=0.4, window=(3, 3, 3))
    assert settled("nabla:cdf=0.7+window:tile=[1,8,8]").mask.of[0] == NablaSource(cdf=0.7, window=(1, 1, 3))
    assert settled("dense").mask == DbspConfig().mask
    dense = make_tiny_transformer("kandinsky5")
    assert resolve_config({}, dense).mask == DbspConfig().mask
    assert resolve_config("nabla", dense).mask == NablaSource()


def test_processors_of_super_resolution_are_its_own_again():
    transformer = make_tiny_transformer("kandinsky6-sr")
    attention = transformer.visual_transformer_blocks[0].self_attention
    before = attention.processor
    dbsp_diffusers.enable(transformer)
    assert attention.processor is not before
    dbsp_diffusers.disable(transformer)
    assert attention.processor is before
