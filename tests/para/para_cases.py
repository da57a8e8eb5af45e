"""What the workers run: stock diffusers transformers under dbsp_para, against one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import dbsp_para
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.runtime.session.session import AttentionSession
from dbsp_diffusers.patching import PatchSet
from dbsp_diffusers.reference import attach_single_process
from dbsp_diffusers.sharding.generations import Generations
from tests.support.models.transformers_for_tests import Inputs, make_transformer


@dataclass(frozen=True)
class ParaCase:
    """One forward pass. thw: size of the token grid; batch_groups: groups of ranks that share out the batch."""

    model: str
    thw: tuple[int, int, int]
    config: dict[str, Any] = field(default_factory=dict)
    batch: int = 1
    text_tokens: int = 7
    batch_groups: int = 1

    @property
    def mesh(self) -> Any:
        if self.batch_groups == 1:
            return None
        from para_attn.context_parallel import init_context_parallel_mesh

        return init_context_parallel_mesh("cpu", max_batch_dim_size=self.batch_groups)


def run_para_case(rank: int, world: int, case: ParaCase) -> tuple[float, float]:
    """(largest difference from one process with the same mask, from dense attention), both on the whole output."""
    transformer = make_transformer(case.model)
    inputs = Inputs.random(case.model, case.thw, case.batch, case.text_tokens)
    with torch.no_grad():
        dense = transformer(**inputs.arguments)[0]
        single = attach_single_process(transformer, case.config)
        expected = transformer(**inputs.arguments)[0]
        single.detach()

        before = fingerprint(transformer)
        dbsp_para.parallelize_transformer(transformer, mesh=case.mesh, config=case.config)
        out = transformer(**inputs.arguments)[0]
        dbsp_para.unparallelize(transformer)
        dbsp_para.parallelize_transformer(transformer, mesh=case.mesh, config=case.config)  # its first pass again
        named = transformer(**inputs.arguments | {"return_dict": True})
        assert type(named).__name__ == "Transformer2DModelOutput"
        assert torch.equal(named.sample, out)
        dbsp_para.unparallelize(transformer)
        assert fingerprint(transformer) == before, "unparallelize left something behind"
        assert torch.equal(transformer(**inputs.arguments)[0], dense)
    return float((out - expected).abs().max()), float((out - dense).abs().max())


def run_sparge_case(rank: int, world: int, case: ParaCase, steps: int = 3) -> list[tuple[float, float, float]]:
    """A few forward passes whose input is the last one's output, as in denoising, with masks predicted at each.

    returns: per pass, (largest difference from one process, from dense attention, mean density over layers)
    """
    transformer = make_transformer(case.model)
    results = []
    inputs = Inputs.random(case.model, case.thw, case.batch, case.text_tokens).arguments
    single = {**inputs}
    for step in range(steps):
        inputs["timestep"] = single["timestep"] = torch.full((case.batch,), 900 - 100 * step)
        with torch.no_grad():
            dense = transformer(**inputs)[0]
            attachment = attach_single_process(transformer, case.config)
            expected = transformer(**single)[0]
            attachment.detach()
            dbsp_para.parallelize_transformer(transformer, mesh=case.mesh, config=case.config)
            out = transformer(**inputs)[0]
            records = session_of(transformer).records
            dbsp_para.unparallelize(transformer)
        density = sum(record.density for record in records.values()) / len(records)
        results.append((float((out - expected).abs().max()), float((out - dense).abs().max()), density))
        inputs["hidden_states"], single["hidden_states"] = out, expected
    return results


def session_of(transformer: torch.nn.Module) -> AttentionSession:
    return dbsp_para.session_of(transformer)


def run_through_para_attn(rank: int, world: int, ring: int, config: dict[str, Any]) -> float:
    """The same through para-attn's own function and device mesh, which also say the strategy."""
    from para_attn.context_parallel import init_context_parallel_mesh
    from para_attn.context_parallel.diffusers_adapters import parallelize_transformer

    transformer = make_transformer("wan")
    inputs = Inputs.random("wan", (3, 5, 7), 1, 7)
    with torch.no_grad():
        single = attach_single_process(transformer, config)
        expected = transformer(**inputs.arguments)[0]
        single.detach()
        mesh = init_context_parallel_mesh("cpu", max_ring_dim_size=ring)
        parallelize_transformer(transformer, mesh=mesh, attn="dbsp", config=config)
        with pytest.raises(ValueError, match="parallelized already"):
            parallelize_transformer(transformer, mesh=mesh, attn="dbsp", config=config)
        out = transformer(**inputs.arguments)[0]
    return float((out - expected).abs().max())


def run_pipeline_case(rank: int, world: int, model: str, folder: str, config: dict[str, Any]) -> tuple[float, float]:
    """A whole tiny pipeline: (largest difference of the latents from one process, sum of unseeded latents)."""
    import diffusers

    cls = {"wan": diffusers.WanPipeline, "cogvideox": diffusers.CogVideoXPipeline}[model]
    pipe = cls.from_pretrained(folder, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    # Guidance multiplies rounding by its scale: at 6, latents of 11.5 differ by 1.1e-5 (by nothing in float64).
    size = {
        "guidance_scale": 2.0,
        "height": 64,
        "width": 96,
        "num_frames": 9,
        "num_inference_steps": 2,
        "output_type": "latent",
    }

    def latents(**options: Any) -> torch.Tensor:
        return pipe(prompt="the sea at dusk", **size, **options).frames

    single = attach_single_process(pipe.transformer, config, lambda: len(pipe.scheduler.timesteps))
    expected = latents(generator=torch.Generator().manual_seed(3))
    single.detach()
    dbsp_para.parallelize_pipe(pipe, config=config)
    out = latents(generator=torch.Generator().manual_seed(3))
    torch.manual_seed(rank)  # ranks would draw different noise
    unseeded = latents()
    dbsp_para.unparallelize(pipe)
    assert type(pipe) is cls
    return float((out - expected).abs().max()), float(unseeded.double().sum())


class _Offloaded:
    """A pipeline whose weights wait elsewhere than it computes."""

    device = torch.device("cuda")
    _execution_device = torch.device("cpu")

    def __call__(self, *, generator: torch.Generator) -> tuple[torch.Tensor, torch.device]:
        return torch.randn(3, generator=generator), generator.device


def unseeded_noise(rank: int, world: int) -> tuple[list[float], str]:
    """(noise, device of its generator) of a call without a generator, under model offload."""
    pipe, attachment = _Offloaded(), PatchSet()
    Generations(pipe, SequenceGroup.of()).attach(attachment, shares_seeds=True)
    torch.manual_seed(rank)  # ranks would draw different noise
    noise, device = pipe()
    attachment.detach()
    return noise.tolist(), str(device)


def run_with_grad_enabled(rank: int, world: int, model: str) -> tuple[float, bool]:
    """(difference of a forward pass from the same under no_grad, whether its output would have a gradient), with
    nothing that requires one."""
    transformer = make_transformer(model).requires_grad_(False)
    inputs = Inputs.random(model, (3, 5, 7), 2, 7).arguments
    config = {"mask": {"source": "sparge", "cdf": 0.6, "block_q": 16, "block_k": 8}, "strategy": "U1R2"}
    dbsp_para.parallelize_transformer(transformer, config=config)
    with torch.enable_grad():
        out = transformer(**inputs)[0]
    dbsp_para.unparallelize(transformer)
    dbsp_para.parallelize_transformer(transformer, config=config)
    with torch.no_grad():
        expected = transformer(**inputs)[0]
    dbsp_para.unparallelize(transformer)
    return float((out - expected).abs().max()), out.requires_grad


def fingerprint(module: torch.nn.Module) -> list[Any]:
    """Classes, instance attributes and hooks of a module and all in it, to compare before and after."""
    state = []
    for name, part in module.named_modules():
        hooks = [len(part._forward_hooks), len(part._forward_pre_hooks)]
        processor = getattr(part, "processor", None)
        state.append((name, type(part), sorted(vars(part)), hooks, sorted(vars(processor)) if processor else None))
    return state


def run_until_error(rank: int, world: int, case: ParaCase) -> str:
    """The message of the ValueError that parallelizing or running the model raises; "" if none does."""
    transformer = make_transformer(case.model)
    inputs = Inputs.random(case.model, case.thw, case.batch, case.text_tokens)
    try:
        with torch.no_grad():
            dbsp_para.parallelize_transformer(transformer, config=case.config)
            transformer(**inputs.arguments)
    except ValueError as error:
        return str(error)
    return ""
