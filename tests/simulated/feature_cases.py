"""Features of other libraries together with db-SP on simulated GPUs, put on before `enable` or after it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import dbsp_diffusers
from tests.diffusers.cache_cases import CPU, Denoising, enable_cache_dit
from tests.simulated.model_cases import MASKS, brief_inputs, moved, own_device
from tests.support.models.tiny_pipelines import fingerprint
from tests.support.models.tiny_transformers import make_brief_transformer
from tests.support.outcomes import apart
from tests.support.shared import shared
from tests.support.single_process import attach_single_process

CONFIG = {"mask": MASKS["static"] | {"block_q": 24, "block_k": 24}, "strategy": "U2R1"}
_ONE_AT_A_TIME = threading.Lock()  # backends are chosen, and random weights drawn, for the whole process


class Run(Denoising):
    """Denoising of a tiny transformer of one layer, or of two for caches."""

    def __init__(self, model: str, steps: int, batch: int = 1, device: torch.device = CPU) -> None:
        with _ONE_AT_A_TIME:
            transformer = make_brief_transformer(model, num_layers=2 if steps > 2 else 1)
        inputs = brief_inputs(model)
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor) and len(value) == 1:
                inputs[name] = torch.cat([value] * batch)
        super().__init__(transformer, moved(inputs, device), steps, device, counts=steps > 2)


PutOn = Callable[[Run], None]


@dataclass(frozen=True)
class Feature:
    """A feature of another library.

    Attributes:
        acts: Whether it changes what a transformer gives.
        skips: Whether it skips blocks.
        offloads: Whether it brings weights to the device itself.
    """

    put_on: PutOn
    model: str = "wan"
    steps: int = 2
    batch: int = 1
    acts: bool = False
    skips: bool = False
    offloads: bool = False


def _model_offload(run: Run) -> None:
    from accelerate import cpu_offload_with_hook

    cpu_offload_with_hook(run.transformer, execution_device=run.device)


def _sequential_offload(run: Run) -> None:
    from accelerate import cpu_offload

    cpu_offload(run.transformer, execution_device=run.device)


def _group_offload(**options: Any) -> PutOn:
    return lambda run: run.transformer.enable_group_offload(run.device, CPU, **options)


def _streamed_offload(run: Run) -> None:
    torch.cuda.set_device(run.device)  # on which diffusers makes its stream
    run.transformer.enable_group_offload(run.device, CPU, offload_type="leaf_level", use_stream=True)


def _lora(run: Run) -> None:
    from peft import LoraConfig

    with _ONE_AT_A_TIME:
        run.transformer.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_k", "to_v", "to_out.0", "proj_out"]))
    draws = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in run.transformer.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=draws).mul_(0.05))


def _layerwise(run: Run) -> None:
    run.transformer.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)


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


def _int8_weights(run: Run) -> None:
    for name, layer in list(run.transformer.named_modules()):
        if type(layer) is nn.Linear:
            parent, _, own = name.rpartition(".")
            setattr(run.transformer.get_submodule(parent), own, _Int8Linear(layer))


def _cross_backend(run: Run) -> None:
    """Sets a backend as a user's "flash" or "sage" would be: one that this machine has."""
    from diffusers.models.attention_dispatch import attention_backend

    with _ONE_AT_A_TIME, attention_backend():  # else it would be that of all models of this process from now on
        run.transformer.set_attention_backend("_native_math")


def _cache(name: str, **options: Any) -> PutOn:
    def put_on(run: Run) -> None:
        from diffusers import hooks

        asks = name in ("FasterCache", "PyramidAttentionBroadcast")
        clock = {"current_timestep_callback": lambda: run.timestep} if asks else {}
        run.transformer.enable_cache(getattr(hooks, f"{name}Config")(**options, **clock))

    return put_on


def _cache_dit(run: Run) -> None:
    with _ONE_AT_A_TIME:
        enable_cache_dit(run.transformer, 0.3, run.steps)


_PYRAMID = {
    "spatial_attention_block_skip_range": 2,
    "spatial_attention_timestep_skip_range": (100, 950),
    "spatial_attention_block_identifiers": ("blocks",),
}
_FASTER = {
    "spatial_attention_block_skip_range": 2,
    "spatial_attention_timestep_skip_range": (-1, 901),
    "unconditional_batch_skip_range": 2,
    "unconditional_batch_timestep_skip_range": (-1, 801),
    "attention_weight_callback": lambda _: 0.3,
    "tensor_format": "BFCHW",
}
_MAG = {"num_inference_steps": 3, "mag_ratios": [1.0, 1.0, 0.99], "retention_ratio": 0.2, "threshold": 0.3}
_TAYLOR = {
    "cache_interval": 2,
    "disable_cache_before_step": 1,
    "taylor_factors_dtype": torch.float32,
    "cache_identifiers": [r".*blocks\.\d+\.attn1"],
}
_cached = functools.partial(Feature, steps=3, acts=True)
_offloads = functools.partial(Feature, offloads=True)

FEATURES: dict[str, Feature] = {
    "model offload": _offloads(_model_offload),
    "sequential offload": _offloads(_sequential_offload),
    "group offload by blocks": _offloads(_group_offload(offload_type="block_level", num_blocks_per_group=1)),
    "group offload by leaves": _offloads(_group_offload(offload_type="leaf_level")),
    "group offload on a stream": _offloads(_streamed_offload),
    "LoRA": Feature(_lora, acts=True),
    "layerwise casting": Feature(_layerwise, acts=True),
    "fused QKV": Feature(lambda run: run.transformer.fuse_qkv_projections()),
    "int8 weights": Feature(_int8_weights, acts=True),
    "another backend": Feature(_cross_backend),
    "first-block cache": _cached(_cache("FirstBlockCache", threshold=0.3), skips=True),
    "TaylorSeer": _cached(_cache("TaylorSeerCache", **_TAYLOR)),
    "pyramid attention broadcast": _cached(_cache("PyramidAttentionBroadcast", **_PYRAMID)),
    "FasterCache": _cached(_cache("FasterCache", **_FASTER), model="cogvideox", batch=2),
    "MagCache": _cached(_cache("MagCache", **_MAG, max_skip_steps=1), skips=True),
    "SeaCache": _cached(_cache("SeaCache", threshold=1.0), skips=True),
    "cache-dit": _cached(_cache_dit, skips=True),
}


@dataclass(frozen=True)
class Together:
    """The findings of one rank about features together with db-SP.

    Attributes:
        difference: The largest difference from one process with the features.
        effect: The largest difference between one process with the features and without.
        computed, expected: Number of blocks computed in each pass, and in one process.
        is_as_before: Whether the transformer, and its samples, are after `disable` those of one that db-SP was never
            enabled on.
    """

    difference: float
    effect: float
    computed: list[int]
    expected: list[int]
    is_as_before: bool


@dataclass(frozen=True)
class Order:
    """Names in `FEATURES` in the order in which they are put on, and how many of them before `enable`."""

    features: tuple[str, ...]
    before: int

    @property
    def parts(self) -> list[Feature]:
        return [FEATURES[name] for name in self.features]

    @property
    def sizes(self) -> tuple[str, int, int]:
        """Model, steps and batch that all features can have."""
        parts = self.parts
        model = next((one.model for one in parts if one.model != "wan"), "wan")
        return model, max(one.steps for one in parts), max(one.batch for one in parts)

    @property
    def acting(self) -> tuple[str, ...]:
        return tuple(name for name in self.features if FEATURES[name].acts)


@shared
def one_process(sizes: tuple[str, int, int], names: tuple[str, ...]) -> tuple[list[torch.Tensor], list[int]]:
    """Returns samples of one process on the CPU with the same masks and these features, and blocks computed."""
    alone = Run(*sizes)
    for name in names:
        FEATURES[name].put_on(alone)
    attach_single_process(alone.transformer, CONFIG)
    return alone.run()


def together(rank: int, world: int, order: Order) -> Together:
    """Runs features together with db-SP, and alone after `disable`, on simulated devices."""
    device = torch.device("cuda", rank)
    before, after = order.parts[: order.before], order.parts[order.before :]
    without, _ = one_process(order.sizes, ())
    expected, computed = one_process(order.sizes, order.acting)
    ours = Run(*order.sizes, device)
    # 1. A transformer that db-SP is enabled on.
    _put_on(before, ours)
    if after and not before:
        if any(one.offloads for one in after):
            own_device(rank)  # else db-SP finds it by the weights or offload hooks
        else:
            ours.transformer.to(device)
    dbsp_diffusers.enable(ours.transformer, CONFIG)
    _put_on(after, ours, before)
    found, blocks = ours.run()
    dbsp_diffusers.disable(ours.transformer)
    there, (again, _) = fingerprint(ours.transformer), ours.run()
    # 2. One that it never is.
    never = Run(*order.sizes, device)
    if after and not before and not any(one.offloads for one in after):
        never.transformer.to(device)
    _put_on(before, never)
    _put_on(after, never, before)
    never.run()
    wanted, (dense, _) = fingerprint(never.transformer), never.run()
    as_before = there == wanted and all(torch.equal(one, other) for one, other in zip(again, dense, strict=True))
    return Together(apart(found, expected), apart(expected, without), blocks, computed, as_before)


def _put_on(features: Sequence[Feature], run: Run, others: Sequence[Feature] = ()) -> None:
    """Puts features on a transformer, which then is on the run's device unless a feature offloads it."""
    for feature in features:
        feature.put_on(run)
    if features and not any(one.offloads for one in (*features, *others)):
        run.transformer.to(run.device)
