"""What the workers run: images and videos of several sizes in one call, against one by one."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dbsp_diffusers
from dbsp_diffusers import PackedSample, packed_forward, packed_forward_local
from dbsp_diffusers.models import architecture_of
from tests.diffusers.models.model_cases import MASKS
from tests.support.models.tiny_transformers import TEXT, Thw, make_tiny_transformer
from tests.support.references import by_first_rank
from tests.support.settings import with_debug
from tests.support.single_process import attach_single_process

CONFIGS: dict[str, dict[str, Any]] = {"dense": {"source": "dense", "block_q": 16, "block_k": 8}, **MASKS}
SIZES = (((2, 5, 7), TEXT), ((1, 4, 6), 5), ((4, 7, 5), 12), ((1, 3, 3), 1))
"""Token grids, and tokens of text; the third is longer than all others together."""
LOADERS = {2: (0, 0, 0, 0), 3: (2, 0, 0, 2), 4: (3, 1, 1, 0)}
"""By number of ranks, the rank that is given each sample; one has none."""


def make_model(model: str, dtype: torch.dtype) -> Any:
    """A tiny transformer to be trained. "-dev": one that is given the guidance scale; "-lora": adapters alone"""
    options = {"guidance_embeds": True} if model == "flux-dev" else {}
    transformer = make_tiny_transformer(re.sub("-dev|-lora", "", model), **options)
    if model.endswith("-lora"):
        from peft import LoraConfig

        parts = ["to_q", "to_v", "to_out.0", "add_k_proj", "proj_out", "norm.linear", "norm1_context.linear"]
        transformer.requires_grad_(False)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            transformer.add_adapter(LoraConfig(r=4, init_lora_weights=False, target_modules=parts))
    return transformer.to(dtype).train()


def drawn_sample(
    model: str, draws: torch.Generator, thw: Thw, text: int, timestep: Any, dtype: torch.dtype
) -> PackedSample:
    """One over a token grid; with Flux, which makes images, frames are below one another."""
    t, h, w = thw

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draws).to(dtype)

    if model.startswith("flux"):
        latents, prompt, pooled = noise(1, 1, 2 * t * h, 2 * w), noise(text, 32), noise(32)
        guidance = 3.5 if model == "flux-dev" else None
        return PackedSample(latents, timestep / 1000, prompt, pooled=pooled, guidance=guidance)
    if model.startswith("hunyuan"):
        latents, prompt = noise(4, t, h, w), noise(text, 16)
        return PackedSample(latents, timestep, prompt, pooled=noise(8), guidance=1000.0 * (2 + text))
    image = noise(17, 20) if model == "wan-i2v" else None
    prompt = noise(text if image is None else 512, 16)
    return PackedSample(noise(4, t, 2 * h, 2 * w), timestep, prompt, image)


def samples_of(model: str, dtype: torch.dtype) -> list[PackedSample]:
    draws, made = torch.Generator().manual_seed(0), []
    for index, ((t, h, w), text) in enumerate(SIZES):
        timestep: Any = torch.tensor(100 + 200 * index)
        if model == "wan-ti2v":
            timestep = torch.full((t * h * w,), 300.0 + index)
            timestep[: h * w] = 0  # of a given first frame
        made.append(drawn_sample(model, draws, (t, h, w), text, timestep, dtype))
    return made


def one_by_one(transformer: Any, samples: list[PackedSample]) -> list[torch.Tensor]:
    """Stock diffusers."""
    by_class = {"FluxTransformer2DModel": _one_of_flux, "HunyuanVideoTransformer3DModel": _one_of_hunyuan}
    predict = by_class.get(type(transformer).__name__, _one_of_wan)
    return [predict(transformer, sample) for sample in samples]


def _one_of_wan(transformer: Any, sample: PackedSample) -> torch.Tensor:
    times, image = sample.condition.timesteps, sample.image
    times = times[None] if len(times) > 1 else times
    inputs = sample.latents[None], times, sample.text[None], None if image is None else image[None]
    return transformer(*inputs, return_dict=False)[0][0]


def _one_of_flux(transformer: Any, sample: PackedSample) -> torch.Tensor:
    """With tokens and positions as the pipeline makes them."""
    assert sample.pooled is not None
    apart = F.pixel_unshuffle(sample.latents[:, 0], 2)
    rows, columns = apart.shape[1:]
    tokens = transformer(
        hidden_states=apart.flatten(1).T[None],
        encoder_hidden_states=sample.text[None],
        pooled_projections=sample.pooled[None],
        timestep=sample.condition.timesteps,
        img_ids=torch.cartesian_prod(torch.zeros(1), torch.arange(float(rows)), torch.arange(float(columns))),
        txt_ids=torch.zeros(len(sample.text), 3),
        guidance=sample.condition.guidance,
        return_dict=False,
    )[0]
    return F.pixel_shuffle(tokens[0].T.unflatten(1, (rows, columns)), 2)[:, None]


def _one_of_hunyuan(transformer: Any, sample: PackedSample) -> torch.Tensor:
    assert sample.pooled is not None
    return transformer(
        hidden_states=sample.latents[None],
        timestep=sample.condition.timesteps,
        encoder_hidden_states=sample.text[None],
        encoder_attention_mask=torch.ones(1, len(sample.text), dtype=torch.long),
        pooled_projections=sample.pooled[None],
        guidance=sample.condition.guidance,
        return_dict=False,
    )[0][0]


def loss_of(predictions: list[torch.Tensor], numbers: list[int]) -> torch.Tensor:
    """Each value is weighed at random. numbers: of the samples"""
    parts = []
    for number, prediction in zip(numbers, predictions, strict=True):
        draws = torch.Generator().manual_seed(number)
        weights = torch.randn(prediction.shape, generator=draws, dtype=torch.float64)
        parts.append((prediction * weights.to(prediction)).mean())
    return sum(parts, torch.zeros((), dtype=torch.float64))


def gradients_of(transformer: Any) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in transformer.named_parameters() if p.grad is not None}
    return {name: grad.full_tensor() if isinstance(grad, DTensor) else grad for name, grad in found.items()}


def apart(found: Any, expected: Any) -> float:
    """Largest difference as a share of the largest value."""
    largest = max(float(one.detach().abs().max()) for one in expected)
    return max(float((a - b).detach().abs().max()) for a, b in zip(found, expected, strict=True)) / largest


def wide_floats(dtype: torch.dtype) -> Any:
    """In float64 diffusers' norms and modulations, which are in float32, are made so too."""
    wide = dtype == torch.float64
    return patch.object(torch.Tensor, "float", torch.Tensor.double) if wide else nullcontext()


@by_first_rank
def references(model: str, mask: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Predictions and gradients of one process, one by one."""
    samples = samples_of(model, dtype)
    with wide_floats(dtype):
        transformer = make_model(model, dtype)
        single = attach_single_process(transformer, {"mask": CONFIGS[mask]})
        expected = one_by_one(transformer, samples)
        loss_of(expected, [*range(len(samples))]).backward()
        single.detach()
    return [one.detach() for one in expected], gradients_of(transformer)


def packed_is_one_by_one(
    rank: int,
    world: int,
    model: str,
    mask: str,
    strategy: str,
    local: bool,
    checkpointing: bool = False,
    fsdp: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[float, float, float]:
    """Largest differences of predictions and of gradients, each as a share of the largest, and of gradients that were
    not summed over the ranks. local: each rank is given its loader's samples, and has the loss of these alone"""
    config = with_debug({"mask": CONFIGS[mask], "strategy": strategy}, checkpointing)
    samples = samples_of(model, dtype)
    expected, gradients = references(model, mask, dtype)
    with wide_floats(dtype):
        transformer = make_model(model, dtype)
        if checkpointing:
            transformer.enable_gradient_checkpointing()
        if fsdp:
            mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("everyone",))
            for part in (*architecture_of(transformer).blocks_of(transformer), transformer):
                fully_shard(part, mesh=mesh)
        session = dbsp_diffusers.enable(transformer, config)
        if local:
            own = [number for number, loader in enumerate(LOADERS[world]) if loader == rank]
            found = packed_forward_local(transformer, [samples[number] for number in own])
            predictions = found.samples
            loss = loss_of(predictions, own) + found.zero
        else:
            own = [*range(len(samples))]
            predictions = packed_forward(transformer, samples)
            loss = loss_of(predictions, own)
        loss.backward()
        partial = apart(gradients_of(transformer).values(), gradients.values())
        dbsp_diffusers.sum_gradients(transformer)
        summed = gradients_of(transformer)
        assert session.statistics()["calls"] == session.layers, "what is computed again in backward is not counted"
        dbsp_diffusers.disable(transformer)
    assert summed.keys() == gradients.keys()
    of_predictions = apart(predictions, [expected[number] for number in own]) if own else 0.0
    return of_predictions, apart(summed.values(), gradients.values()), partial


def stock_calls_still_work(rank: int, world: int) -> tuple[float, float, bool]:
    """Packed calls and stock ones take turns; disabled, the transformer packs on one process, without a trace."""
    samples = samples_of("wan", torch.float32)
    transformer = make_tiny_transformer("wan")
    before = set(vars(transformer)) | set(vars(transformer.blocks[0]))
    with torch.no_grad():
        expected = one_by_one(transformer, samples)
        dbsp_diffusers.enable(transformer, {"mask": {"source": "dense"}})
        packed = [packed_forward(transformer, samples), one_by_one(transformer, samples)]
        packed += [packed_forward(transformer, samples[::-1])[::-1]]
        dbsp_diffusers.disable(transformer)
        undone = set(vars(transformer)) | set(vars(transformer.blocks[0])) == before
        alone = packed_forward(transformer, samples)
    return max(apart(found, expected) for found in packed), apart(alone, expected), undone


def alone_is_one_by_one(rank: int, world: int, model: str, checkpointing: bool) -> tuple[float, float]:
    """Without db-SP, on stock weights: differences of predictions and gradients."""
    samples = samples_of(model, torch.float64)
    found = []
    with wide_floats(torch.float64):
        for call in (one_by_one, packed_forward):
            transformer = make_model(model, torch.float64)
            if checkpointing:
                transformer.enable_gradient_checkpointing()
            predictions = call(transformer, samples)
            loss_of(predictions, [*range(len(samples))]).backward()
            found.append((predictions, list(gradients_of(transformer).values())))
    (expected, gradients), (packed, own) = found
    return apart(packed, expected), apart(own, gradients)


def kept_by_modulation(rank: int, world: int) -> tuple[int, int]:
    """(largest number of elements that autograd keeps of a modulation next to its input, of the few rows)."""
    from dbsp_diffusers.packed.passes import scaled

    kept: list[int] = []
    x = torch.randn(1, 1000, 8, requires_grad=True)
    rows = torch.randn(3, 8, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(0 if t is x else t.numel()) or t, lambda t: t):
        scaled(x, rows, torch.arange(1000) % 3).sum().backward()
    return max(one for one in kept if one != 1000), rows.numel()


def bad_input(rank: int, world: int, kind: str) -> None:
    """Each of these raises on all ranks, and leaves them together."""
    model = {"model": "hunyuan1.5", "pooled": "hunyuan", "guidance": "hunyuan", "frames": "flux"}.get(kind, "wan")
    transformer = make_tiny_transformer(model)
    samples = samples_of("wan" if kind == "model" else model, torch.float32)
    if kind != "not enabled":
        dbsp_diffusers.enable(transformer, {"mask": {"source": "dense"}})
    one = samples[0]
    wrong = {
        "channels": PackedSample(one.latents[:2], 1.0, one.text),
        "patches": PackedSample(one.latents[:, :, 1:], 1.0, one.text),
        "text": PackedSample(one.latents, 1.0, one.text[:, :3]),
        "timestep": PackedSample(one.latents, torch.arange(7), one.text),
        "image": PackedSample(one.latents, 1.0, one.text, torch.ones(2, 2)),
        "pooled": replace(one, pooled=None),
        "guidance": replace(one, guidance=None),
        "frames": replace(one, latents=one.latents.expand(-1, 2, -1, -1)),
        "dtype": PackedSample(one.latents, 1.0, one.text.bfloat16()),
    }
    try:
        if kind == "none":
            packed_forward_local(transformer, [])
        elif kind == "empty":
            packed_forward(transformer, [])
        else:
            packed_forward_local(transformer, [wrong.get(kind, one)] if rank == world - 1 else [one])
    finally:
        if dist.is_initialized():
            dist.barrier()
        dbsp_diffusers.disable(transformer)
