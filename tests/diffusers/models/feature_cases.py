"""What the workers run: FSDP2 and torchao before db-SP and after, IP-Adapters, and attention backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import dbsp_diffusers
from tests.diffusers.models.model_cases import MASKS, apart, outputs
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.references import by_first_rank
from tests.support.single_process import attach_single_process

CONFIG = {"mask": MASKS["sparge"], "strategy": "U1R2"}


def _fsdp(transformer: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    if torch.distributed.is_initialized():
        for block in transformer.blocks:
            fully_shard(block)
        fully_shard(transformer)


def _torchao(transformer: Any) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(transformer.blocks, Int8WeightOnlyConfig())


def _cross_backend(transformer: Any) -> None:
    """As a user's "flash" or "sage" would be: one that this machine has."""
    from diffusers.models.attention_dispatch import attention_backend

    with attention_backend():  # else it would be that of all models of this process from now on
        transformer.set_attention_backend("_native_math")


FEATURES: dict[str, Callable[[Any], None]] = {"FSDP2": _fsdp, "torchao int8 weights": _torchao}


@by_first_rank
def one_process(name: str) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """(without a feature, dense with it, with it)"""
    inputs, plain = tiny_inputs("wan"), make_tiny_transformer("wan")
    with torch.no_grad():
        single = attach_single_process(plain, CONFIG)
        without = outputs(plain, inputs)
        single.detach()
        if name != "FSDP2":  # which changes no value, and needs all ranks
            FEATURES[name](plain)
        dense = outputs(plain, inputs)
        single = attach_single_process(plain, CONFIG)
        expected = outputs(plain, inputs)
        single.detach()
    return without, dense, expected


def run_feature(rank: int, world: int, name: str, first: bool) -> tuple[float, float, float]:
    """(difference from one process with the feature in two passes, its own effect, of dense passes at the end)."""
    put_on, inputs = FEATURES[name], tiny_inputs("wan")
    without, dense, expected = one_process(name)
    with torch.no_grad():
        ours = make_tiny_transformer("wan")
        if first:
            put_on(ours)
        dbsp_diffusers.enable(ours, CONFIG)
        if not first:
            put_on(ours)
        out = [outputs(ours, inputs), outputs(ours, inputs)]
        dbsp_diffusers.disable(ours)
        after = outputs(ours, inputs)
    return max(apart(one, expected) for one in out), apart(expected, without), apart(after, dense)


def run_ip_adapter(rank: int, world: int) -> tuple[float, float]:
    """Flux with an image prompt: (difference from one process, from another image)."""
    transformer = make_tiny_transformer("flux")
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(5)
        transformer._load_ip_adapter_weights([_ip_adapter_weights(transformer.config)])
        images = torch.randn(2, 1, 1, transformer.config.pooled_projection_dim)
        found = []
        for put_on in (attach_single_process, dbsp_diffusers.enable):
            attached = put_on(transformer, CONFIG)
            for image in images:
                kwargs = {"joint_attention_kwargs": {"ip_adapter_image_embeds": image}}
                found.append(outputs(transformer, tiny_inputs("flux") | kwargs))
            if put_on is attach_single_process:
                attached.detach()
        dbsp_diffusers.disable(transformer)
    return apart(found[3], found[1]), apart(found[3], found[2])


def _ip_adapter_weights(config: Any) -> dict[str, dict[str, torch.Tensor]]:
    """Random ones for every block of two streams, as the file of an adapter has them."""
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


def _backend(processor: Any) -> str:
    return str(getattr(processor._attention_backend, "value", processor._attention_backend))


def run_backends(rank: int, world: int) -> list[tuple[list[str], list[str], float]]:
    """With one processor for all attention modules, and the user's backend set before db-SP, or after it.

    returns: by order, the backends of self-attention, of cross-attention, and the difference from one process
    """
    inputs, found = tiny_inputs("wan"), []
    for first in (True, False):
        transformer = make_tiny_transformer("wan")
        shared = transformer.blocks[0].attn1.processor
        transformer.set_attn_processor(shared)
        with torch.no_grad():
            single = attach_single_process(transformer, CONFIG)
            expected = outputs(transformer, inputs)
            single.detach()
            if first:
                _cross_backend(transformer)
            dbsp_diffusers.enable(transformer, CONFIG)
            if not first:
                _cross_backend(transformer)
            difference = apart(outputs(transformer, inputs), expected)
            backends = (
                [_backend(getattr(block, name).processor) for block in transformer.blocks]
                for name in ("attn1", "attn2")
            )
            found.append((*backends, difference))
            dbsp_diffusers.disable(transformer)
        assert all(module.processor is shared for block in transformer.blocks for module in (block.attn1, block.attn2))
        assert _backend(shared) == "_native_math"
        transformer.reset_attention_backend()
    return found
