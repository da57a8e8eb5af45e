"""Features of other libraries on simulated GPUs: put on before `enable` and after it, `disable` leaves no trace.

tests/diffusers has, on gloo, what simulated tensors do not: FSDP2, torchao's tensors, torch.compile.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import dbsp_diffusers
from tests.diffusers.cache_cases import CPU, Denoising, enable_cache_dit
from tests.gpu_node.node import GpuNode
from tests.simulated.model_cases import MASKS, brief_inputs, moved, own_device
from tests.support.models.tiny_pipelines import fingerprint
from tests.support.models.tiny_transformers import make_brief_transformer
from tests.support.outcomes import apart, assert_near
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
    "group offload on a stream": _offloads(_streamed_offload),
    "LoRA": Feature(_lora, acts=True),
    "layerwise casting": Feature(_layerwise, acts=True),
    "fused QKV": Feature(lambda run: run.transformer.fuse_qkv_projections()),
    "first-block cache": _cached(_cache("FirstBlockCache", threshold=0.3), skips=True),
    "TaylorSeer": _cached(_cache("TaylorSeerCache", **_TAYLOR)),
    "pyramid attention broadcast": _cached(_cache("PyramidAttentionBroadcast", **_PYRAMID)),
    "FasterCache": _cached(_cache("FasterCache", **_FASTER), model="cogvideox", batch=2),
    "MagCache": _cached(_cache("MagCache", **_MAG, max_skip_steps=1), skips=True),
    "SeaCache": _cached(_cache("SeaCache", threshold=1.0), skips=True),
    "cache-dit": _cached(_cache_dit, skips=True),
}


PAIRS = (
    ("model offload", "pyramid attention broadcast"),
    ("LoRA", "sequential offload"),
    ("group offload by blocks", "MagCache"),
    ("fused QKV", "layerwise casting"),
)
ALONE = ("TaylorSeer", "group offload on a stream", "FasterCache", "cache-dit")
"""With `PAIRS`, each kind of feature: the first of a pair before `enable`, the second after it, these before.

In the long part each is tried alone, both before and after.
"""


Sizes = tuple[str, int, int]
"""Model, steps and batch."""


@shared
def one_process(sizes: Sizes, names: tuple[str, ...]) -> tuple[list[torch.Tensor], list[int]]:
    """Returns samples of one process on the CPU with the same masks and these features, and blocks computed."""
    alone = Run(*sizes)
    for name in names:
        FEATURES[name].put_on(alone)
    attach_single_process(alone.transformer, CONFIG)
    return alone.run()


def with_features(
    rank: int, sizes: Sizes, before: list[Feature], after: list[Feature], enable: Callable[[Any], object]
) -> Run:
    """Returns a transformer on the rank's device with features that are put on before `enable` and after it."""
    run, offloads = Run(*sizes, torch.device("cuda", rank)), any(feature.offloads for feature in before)
    for feature in before:
        feature.put_on(run)
    if not before and any(feature.offloads for feature in after):
        own_device(rank)  # else db-SP finds it by the weights or offload hooks
    elif not offloads:
        run.transformer.to(run.device)
    enable(run.transformer)
    for feature in after:
        feature.put_on(run)
        offloads = offloads or feature.offloads
    if not offloads:
        run.transformer.to(run.device)
    return run


def together(rank: int, world: int, names: tuple[str, ...], before: int) -> None:
    features = [FEATURES[name] for name in names]
    parts = features[:before], features[before:]
    acting = tuple(name for name in names if FEATURES[name].acts)
    model = next((feature.model for feature in features if feature.model != "wan"), "wan")
    sizes = model, max(feature.steps for feature in features), max(feature.batch for feature in features)
    without, _ = one_process(sizes, ())
    expected, computed = one_process(sizes, acting)
    # 1. A transformer that db-SP is enabled on.
    ours = with_features(rank, sizes, *parts, lambda transformer: dbsp_diffusers.enable(transformer, CONFIG))
    samples, blocks = ours.run()
    dbsp_diffusers.disable(ours.transformer)
    found, (again, _) = fingerprint(ours.transformer), ours.run()
    assert_near(samples, expected, without if acting else None)
    assert blocks == computed, "all ranks must skip what one process skips"
    assert min(blocks) < max(blocks) or not any(feature.skips for feature in features), "it must skip"
    # 2. One that it never is.
    never = with_features(rank, sizes, *parts, lambda transformer: None)
    never.run()
    assert found == fingerprint(never.transformer), "disable left something behind"
    assert apart(again, never.run()[0]) == 0


ORDERS = [
    *(pytest.param(pair, 1, id=" then ".join(pair)) for pair in PAIRS),
    *(pytest.param((name,), 1, id=name, marks=() if name in ALONE else pytest.mark.long) for name in FEATURES),
    *(pytest.param((name,), 0, id=f"{name} after", marks=pytest.mark.long) for name in FEATURES),
]


@pytest.mark.parametrize(("names", "before"), ORDERS)
def test_features_on_gpus_equal_one_process_and_leave_no_trace(
    gpu_node: GpuNode, names: tuple[str, ...], before: int
) -> None:
    if "cache-dit" in names:
        pytest.importorskip("cache_dit")
    gpu_node.run(2, together, names, before)
