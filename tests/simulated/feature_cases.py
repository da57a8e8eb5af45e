"""What the simulated node runs: offloading, casting, quantised and fused weights, put on before db-SP and after."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import dbsp_diffusers
from tests.diffusers.models.model_cases import outputs
from tests.simulated.model_cases import MASKS, apart, brief, brief_inputs, moved, own_device
from tests.support.models.tiny_pipelines import fingerprint
from tests.support.shared import shared
from tests.support.single_process import attach_single_process

HOST = torch.device("cpu")
CONFIG = {"mask": MASKS["selected"], "strategy": "U1R2"}
_ONE_AT_A_TIME = threading.Lock()  # backends are chosen, and random weights drawn, for the whole process


def _model_offload(transformer: Any, device: torch.device) -> None:
    from accelerate import cpu_offload_with_hook

    cpu_offload_with_hook(transformer, execution_device=device)


def _lora(transformer: Any, device: torch.device) -> None:
    from peft import LoraConfig

    modules = ["to_q", "to_k", "to_v", "to_out.0", "proj_out"]
    with _ONE_AT_A_TIME:
        transformer.add_adapter(LoraConfig(r=4, target_modules=modules))
    draws = torch.Generator().manual_seed(5)
    for name, parameter in transformer.named_parameters():
        if "lora_" in name:
            parameter.copy_(torch.randn(parameter.shape, generator=draws).mul_(0.05))
    transformer.to(device)


def _fused_lora(transformer: Any, device: torch.device) -> None:
    _lora(transformer, device)
    transformer.fuse_lora()


def _layerwise(transformer: Any, device: torch.device) -> None:
    transformer.to(device)
    transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


def _fused_qkv(transformer: Any, device: torch.device) -> None:
    transformer.to(device)
    transformer.fuse_qkv_projections()


class _Int8Linear(nn.Linear):
    """A layer as quantisers make them: weights of eight bits, without gradients, and a scale."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        scale = layer.weight.abs().amax() / 127
        self.weight = nn.Parameter((layer.weight / scale).round().to(torch.int8), requires_grad=False)
        self.bias = layer.bias
        self.register_buffer("scale", scale.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def _int8_weights(transformer: Any, device: torch.device) -> None:
    for name, layer in list(transformer.named_modules()):
        if type(layer) is nn.Linear:
            parent, _, own = name.rpartition(".")
            setattr(transformer.get_submodule(parent), own, _Int8Linear(layer))
    transformer.to(device)


def _cross_backend(transformer: Any, device: torch.device) -> None:
    """As a user's "flash" or "sage" would be: one that this machine has."""
    from diffusers.models.attention_dispatch import attention_backend

    with _ONE_AT_A_TIME, attention_backend():  # else it would be that of all models of this process from now on
        transformer.set_attention_backend("_native_math")
    transformer.to(device)


FEATURES: dict[str, Callable[[Any, torch.device], None]] = {
    "model offload": _model_offload,
    "LoRA": _lora,
    "fused LoRA": _fused_lora,
    "layerwise casting": _layerwise,
    "fused QKV": _fused_qkv,
    "int8 weights": _int8_weights,
    "another backend": _cross_backend,
}
WITH_AN_EFFECT = {"LoRA", "fused LoRA", "layerwise casting", "int8 weights"}


def _transformer() -> Any:
    with _ONE_AT_A_TIME:
        return brief("wan")


@shared
def one_process(name: str) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Returns what one process on the CPU gives without the feature, with it and dense masks, and with it."""
    plain, inputs = _transformer(), brief_inputs("wan")
    with torch.no_grad():
        single = attach_single_process(plain, CONFIG)
        without = outputs(plain, inputs)
        single.detach()
        if name in WITH_AN_EFFECT:
            FEATURES[name](plain, HOST)
        dense = outputs(plain, inputs)
        single = attach_single_process(plain, CONFIG)
        expected = outputs(plain, inputs)
        single.detach()
    return without, dense, expected


def feature_on_gpus(rank: int, world: int, name: str, first: bool) -> tuple[float, float, float]:
    """Returns the largest difference of two passes from one process, the feature's effect, and how far dense passes
    are from one process's after `disable`."""
    device, put_on = own_device(rank), FEATURES[name]
    without, dense, expected = one_process(name)
    ours, inputs = _transformer(), moved(brief_inputs("wan"), device)
    with torch.no_grad():
        if first:
            put_on(ours, device)
        elif name != "model offload":
            ours.to(device)
        before = fingerprint(ours)
        dbsp_diffusers.enable(ours, CONFIG)
        if not first:
            put_on(ours, device)
        found = [outputs(ours, inputs)]
        if name == "model offload":  # diffusers takes its hooks off and puts them on between calls
            from accelerate.hooks import remove_hook_from_module

            remove_hook_from_module(ours)
            put_on(ours, device)
        found.append(outputs(ours, inputs))
        dbsp_diffusers.disable(ours)
        if first and name != "model offload":
            assert fingerprint(ours) == before, "disable left something behind"
        after = outputs(ours, inputs)
    return max(apart(one, expected) for one in found), apart(expected, without), apart(after, dense)
