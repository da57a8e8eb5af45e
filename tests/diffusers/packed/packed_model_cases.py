"""Images and videos of several sizes in one call or in bags, run by workers, against one by one."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import dbsp_diffusers
from dbsp_core.cost.sequence_cost import bag_layout
from dbsp_core.layout.sequence_layout import SequenceLayout
from dbsp_core.planning.sequences import SequencePlan
from dbsp_diffusers import PackedSample, packed_forward, packed_forward_local
from tests.diffusers.models.model_cases import MASKS
from tests.support.gradients import gradients_of, loss_of, shard_fully, summed_over_ranks, wide_floats
from tests.support.models.tiny_transformers import Thw, make_brief_transformer, make_tiny_transformer
from tests.support.outcomes import share_apart
from tests.support.references import by_first_rank
from tests.support.settings import with_debug
from tests.support.single_process import attach_single_process

CONFIGS: dict[str, dict[str, Any]] = {"dense": {"source": "dense", "block_q": 16, "block_k": 8}, **MASKS}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def make_model(model: str, dtype: torch.dtype, brief: bool = False) -> Any:
    """Returns a tiny transformer to be trained.

    "-dev": one that is given the guidance scale;  "-lora": adapters alone;  brief: of fewer layers and heads
    """
    options = {"guidance_embeds": True} if model == "flux-dev" else {}
    make = make_brief_transformer if brief else make_tiny_transformer
    transformer = make(re.sub("-dev|-lora", "", model), **options)
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
    """Returns a sample over a token grid; with Flux, which makes images, frames are below one another."""
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
    if model == "wan-ti2v":
        timestep = timestep.expand(t * h * w).clone()
        timestep[: h * w] = 0  # of a given first frame
    image = noise(17, 20) if model == "wan-i2v" else None
    prompt = noise(text if image is None else 512, 16)
    return PackedSample(noise(4, t, 2 * h, 2 * w), timestep, prompt, image)


@dataclass(frozen=True)
class PackedCase:
    """A training step or two. samples: how many in each; what and whose they are is drawn by the seed.

    Attributes:
        local: Whether each rank is given its loader's samples; else all are given all.
        moved: Whether each step has the sizes of the first, loaded by the next ranks.
        broken: Whether bags attend in other layouts than those in which tokens arrive.
        brief: Whether transformers and samples are small enough for simulated GPUs.
    """

    bags: str | None = None
    mask: str = "synthetic"
    samples: tuple[int, ...] = (4,)
    seed: int = 0
    local: bool = True
    dtype: torch.dtype = torch.float64
    checkpointing: bool = False
    fsdp: bool = False
    moved: bool = False
    planner: str = "dbsp"
    model: str = "wan"
    broken: bool = False
    strategy: str | None = None
    brief: bool = False

    @property
    def config(self) -> dict[str, Any]:
        config = {"mask": CONFIGS[self.mask], "planner": self.planner, "strategy": self.strategy}
        return config | ({} if self.local or self.bags is None else {"bags": self.bags})

    def step(self, step: int, world: int) -> tuple[list[PackedSample], list[int]]:
        """Returns the samples, and the rank that is given each; some ranks have none."""
        rng = np.random.default_rng([self.seed, 0 if self.moved else step])
        draws = torch.Generator().manual_seed(self.seed * 100 + step)
        samples, loaders = [], []
        busy = rng.permutation(world)[: max(1, world // 2)]
        most = (3, 4, 4) if self.brief else (5, 7, 7)
        for _ in range(self.samples[step]):
            t, h, w = (int(rng.integers(low, high)) for low, high in zip((1, 2, 2), most, strict=True))
            text, timestep = int(rng.integers(1, 12)), torch.tensor(float(rng.integers(1, 999)))
            samples.append(drawn_sample(self.model, draws, (t, h, w), text, timestep, self.dtype))
            loaders.append((int(rng.choice(busy)) + step * self.moved) % world)
        if self.moved:
            return samples, sorted(loaders)
        order = np.argsort(loaders, kind="stable")  # as they are numbered when they are gathered
        return [samples[one] for one in order], [loaders[one] for one in order]


def one_by_one(transformer: Any, samples: list[PackedSample]) -> list[torch.Tensor]:
    """Returns the predictions of stock diffusers."""
    by_class = {"FluxTransformer2DModel": _one_of_flux, "HunyuanVideoTransformer3DModel": _one_of_hunyuan}
    predict = by_class.get(type(transformer).__name__, _one_of_wan)
    return [predict(transformer, sample) for sample in samples]


def _one_of_wan(transformer: Any, sample: PackedSample) -> torch.Tensor:
    times, image = sample.condition.timesteps, sample.image
    times = times[None] if len(times) > 1 else times
    inputs = sample.latents[None], times, sample.text[None], None if image is None else image[None]
    return transformer(*inputs, return_dict=False)[0][0]


def _one_of_flux(transformer: Any, sample: PackedSample) -> torch.Tensor:
    """Makes tokens and positions as the pipeline does."""
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


@by_first_rank
def alone(case: PackedCase, step: int, world: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Returns predictions and gradients of one process, one by one."""
    samples, _ = case.step(step, world)
    with wide_floats(case.dtype):
        transformer = make_model(case.model, case.dtype, case.brief)
        attach_single_process(transformer, {"mask": CONFIGS[case.mask]})
        expected = one_by_one(transformer, samples)
        loss_of(expected, range(len(samples))).backward()
    return [one.detach() for one in expected], gradients_of(transformer)


def _reversed(plan: SequencePlan, tokens: np.ndarray, bag: int) -> SequenceLayout:
    right = bag_layout(plan, tokens, bag)
    return SequenceLayout(right.rank[::-1].copy(), right.local[::-1].copy(), right.world, right.shard)


def differences(
    rank: int, world: int, case: PackedCase, device: torch.device | None = None
) -> list[tuple[float, float, int]]:
    """Returns by step the largest differences of predictions and gradients, each as a share of the largest value, and
    this rank's attentions. device: a simulated GPU, on which ranks have no torch.distributed"""
    results = []
    wrong = patch("dbsp_diffusers.packed.bags.bag_layout", _reversed) if case.broken else nullcontext()
    with wide_floats(case.dtype), wrong:
        transformer = make_model(case.model, case.dtype, case.brief).to(device)
        if case.checkpointing:
            transformer.enable_gradient_checkpointing()
        if case.fsdp:
            shard_fully(transformer, init_device_mesh("cpu", (world,), mesh_dim_names=("everyone",)))
        session = dbsp_diffusers.enable(transformer, with_debug(case.config, case.checkpointing))
        for step in range(len(case.samples)):
            samples, loaders = case.step(step, world)
            samples = [sample if device is None else moved(sample, device) for sample in samples]
            expected, gradients = alone(case, step, world)
            transformer.zero_grad()
            calls = session.statistics()["calls"]
            own = [number for number, loader in enumerate(loaders) if not case.local or loader == rank]
            if case.local:
                found = packed_forward_local(transformer, [samples[number] for number in own], bags=case.bags)
                predictions, zero = found.samples, found.zero
            else:
                predictions, zero = packed_forward(transformer, samples), torch.zeros((), device=device)
            (loss_of(predictions, own).to(zero.device) + zero).backward()
            partial = gradients_of(transformer)
            assert partial.keys() == gradients.keys()
            if device is not None:
                summed = {name: summed_over_ranks(gradient) for name, gradient in partial.items()}
            else:
                if world > 1 and case.bags is None:
                    apart = share_apart(partial.values(), gradients.values())
                    assert apart > 1e-4, "without the sum over ranks gradients are other ones"
                dbsp_diffusers.sum_gradients(transformer)
                summed = gradients_of(transformer)
            of_predictions = share_apart(predictions, [expected[number] for number in own]) if own else 0.0
            of_gradients = share_apart(summed.values(), gradients.values())
            results.append((of_predictions, of_gradients, int(session.statistics()["calls"] - calls)))
        layers = session.layers
        dbsp_diffusers.disable(transformer)
    if case.bags is None:
        assert all(calls == layers for *_, calls in results), "what is computed again in backward is not counted"
    return results


def moved(sample: PackedSample, device: torch.device) -> PackedSample:
    parts = {name: getattr(sample, name) for name in ("latents", "timestep", "text", "image", "pooled")}
    return replace(sample, **{name: one.to(device) for name, one in parts.items() if isinstance(one, torch.Tensor)})


def compare(rank: int, world: int, case: PackedCase, device: torch.device | None = None) -> list[int]:
    """Compares packed samples with one by one. Returns this rank's attentions by step."""
    found = differences(rank, world, case, device)
    for of_predictions, of_gradients, _ in found:
        assert of_predictions <= TOLERANCE[case.dtype], found
        assert of_gradients <= TOLERANCE[case.dtype], found
    return [calls for *_, calls in found]
