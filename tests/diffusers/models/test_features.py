"""FSDP2 and torchao before db-SP and after it, IP-Adapters, backends; tests/simulated has the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend

import dbsp_diffusers
from tests.diffusers.models.model_cases import MASKS
from tests.support.gradients import shard_fully
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.outcomes import alone, apart, assert_near, outputs
from tests.support.references import by_first_rank

CONFIG = {"mask": MASKS["sparge"], "strategy": "U1R2"}


def _torchao(transformer: Any) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(transformer.blocks, Int8WeightOnlyConfig())


FEATURES: dict[str, Callable[[Any], None]] = {"FSDP2": shard_fully, "torchao int8 weights": _torchao}


@by_first_rank
def one_process(name: str) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Returns outputs without a feature, dense with it, and with it."""
    inputs, plain = tiny_inputs("wan"), make_tiny_transformer("wan")
    without = alone(plain, inputs, CONFIG)
    if name != "FSDP2":  # which changes no value, and needs all ranks
        FEATURES[name](plain)
    with torch.no_grad():
        return without, outputs(plain, inputs), alone(plain, inputs, CONFIG)


@torch.no_grad()
def run_feature(rank: int, world: int, name: str, first: bool) -> None:
    put_on, inputs = FEATURES[name], tiny_inputs("wan")
    without, dense, expected = one_process(name)
    ours = make_tiny_transformer("wan")
    if first:
        put_on(ours)
    dbsp_diffusers.enable(ours, CONFIG)
    if not first:
        put_on(ours)
    for _ in range(2):
        assert_near(outputs(ours, inputs), expected, None if name == "FSDP2" else without)
    dbsp_diffusers.disable(ours)
    assert_near(outputs(ours, inputs), dense)


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("name", FEATURES)
def test_feature_with_db_sp_equals_one_process(pool, name, first):
    if name.startswith("torchao"):
        pytest.importorskip("torchao")
    pool(2).run(run_feature, name, first)


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


def _name(backend: Any) -> str:
    return str(getattr(backend, "value", backend))


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
    seen = {"attn1": set[Any](), "attn2": set[Any]()}
    for block in transformer.blocks:
        for name, backends in seen.items():
            getattr(block, name).norm_k.register_forward_hook(
                lambda *_, backends=backends: backends.add(_name(shared._attention_backend))
            )
    assert_near(outputs(transformer, inputs), expected)
    assert seen == {"attn1": {"native"}, "attn2": {"_native_math"}}
    dbsp_diffusers.disable(transformer)
    assert all(module.processor is shared for block in transformer.blocks for module in (block.attn1, block.attn2))
    assert _name(shared._attention_backend) == "_native_math"
    transformer.reset_attention_backend()


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_backend_of_cross_attention_is_the_users_and_of_self_attention_native(threads, first):
    threads(1).run(run_backends, first)
