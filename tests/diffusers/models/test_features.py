"""torchao, IP-Adapters and backends together with db-SP; tests/simulated has the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend

import dbsp_diffusers
from tests.diffusers.models.model_cases import MASKS
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.outcomes import alone, apart, assert_near, outputs

CONFIG = {"mask": MASKS["sparge"], "strategy": "U1R2"}


@torch.no_grad()
def run_torchao(rank: int, world: int) -> None:
    """Runs a transformer whose blocks have int8 weights."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    inputs, transformer = tiny_inputs("wan"), make_tiny_transformer("wan")
    without = alone(transformer, inputs, CONFIG)
    quantize_(transformer.blocks, Int8WeightOnlyConfig())
    dense, expected = outputs(transformer, inputs), alone(transformer, inputs, CONFIG)
    dbsp_diffusers.enable(transformer, CONFIG)
    for _ in range(2):
        assert_near(outputs(transformer, inputs), expected, without)
    dbsp_diffusers.disable(transformer)
    assert_near(outputs(transformer, inputs), dense)


def test_torchao_equals_one_process(pool):
    pytest.importorskip("torchao")
    pool(2).run(run_torchao)


@torch.no_grad()
def run_ip_adapter(rank: int, world: int) -> None:
    """Runs Flux with an image prompt, which another image would change."""
    transformer = make_tiny_transformer("flux")
    with torch.random.fork_rng():
        torch.manual_seed(5)
        transformer._load_ip_adapter_weights([_ip_adapter_weights(transformer.config)])
        images = torch.randn(2, 1, 1, transformer.config.pooled_projection_dim)
    mine, other = (
        tiny_inputs("flux") | {"joint_attention_kwargs": {"ip_adapter_image_embeds": image}} for image in images
    )
    expected, others = (alone(transformer, inputs, CONFIG) for inputs in (mine, other))
    dbsp_diffusers.enable(transformer, CONFIG)
    assert_near(outputs(transformer, mine), expected)
    assert apart(expected, others) > 1e-2
    dbsp_diffusers.disable(transformer)


def _ip_adapter_weights(config: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Returns random weights for every block of two streams, as the file of an adapter has them."""
    text, hidden = config.joint_attention_dim, config.num_attention_heads * config.attention_head_dim
    weights = {}
    for block in range(config.num_layers):
        for name in ("to_k_ip", "to_v_ip"):
            weights[f"{block}.{name}.weight"] = torch.randn(hidden, text)
            weights[f"{block}.{name}.bias"] = torch.randn(hidden)
    tokens = 4
    projection = {
        "proj.weight": torch.randn(tokens * text, config.pooled_projection_dim),
        "proj.bias": torch.randn(tokens * text),
        "norm.weight": torch.ones(text),
        "norm.bias": torch.zeros(text),
    }
    return {"image_proj": projection, "ip_adapter": weights}


def test_image_prompt_of_an_ip_adapter_equals_one_process(pool):
    pool(2).run(run_ip_adapter)


def _set_backend(transformer: Any) -> None:
    """Sets a backend as a user's "flash" or "sage" would be: one that this machine has."""
    with attention_backend():  # else it would be that of all models of this process from now on
        transformer.set_attention_backend("_native_math")


def _backends(transformer: Any, name: str) -> set[str]:
    chosen = [getattr(block, name).processor._attention_backend for block in transformer.blocks]
    return {str(getattr(backend, "value", backend)) for backend in chosen}


@torch.no_grad()
def run_backends(rank: int, world: int, first: bool) -> None:
    """Sets a backend before db-SP or after it, with one processor for all attention modules."""
    config, inputs, transformer = CONFIG | {"strategy": "U1R1"}, tiny_inputs("wan"), make_tiny_transformer("wan")
    shared = transformer.blocks[0].attn1.processor
    transformer.set_attn_processor(shared)
    expected = alone(transformer, inputs, config)
    if first:
        _set_backend(transformer)
    dbsp_diffusers.enable(transformer, config)
    if not first:
        _set_backend(transformer)
    assert_near(outputs(transformer, inputs), expected)
    assert (_backends(transformer, "attn1"), _backends(transformer, "attn2")) == ({"native"}, {"_native_math"})
    dbsp_diffusers.disable(transformer)
    assert all(module.processor is shared for block in transformer.blocks for module in (block.attn1, block.attn2))
    assert _backends(transformer, "attn1") == {"_native_math"}
    transformer.reset_attention_backend()


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_backend_of_cross_attention_is_the_users_and_of_self_attention_native(threads, first):
    threads(1).run(run_backends, first)
