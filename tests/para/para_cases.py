"""What the workers run: stock diffusers transformers under dbsp_para, against one process."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import dbsp_para
from dbsp_core.comm.groups import SequenceGroup
from dbsp_diffusers.patching import PatchSet
from dbsp_diffusers.sharding.generations import Generations
from tests.support.models.tiny_pipelines import alone, fingerprint, latents, load
from tests.support.models.transformers_for_tests import Inputs, make_transformer
from tests.support.references import kept_from_rank_0, mask_settings, pass_alone
from tests.support.shared import reused
from tests.support.single_process import attach_single_process


@dataclass(frozen=True)
class ParaCase:
    """One forward pass. thw: size of the token grid."""

    model: str
    thw: tuple[int, int, int]
    config: dict[str, Any] = field(default_factory=dict)
    batch: int = 1
    text_tokens: int = 7

    @property
    def inputs(self) -> dict[str, Any]:
        return Inputs.random(self.model, self.thw, self.batch, self.text_tokens).arguments

    @property
    def alone(self) -> tuple[Any, ...]:
        """All that matters in one process."""
        return self.model, self.thw, self.batch, self.text_tokens, mask_settings(self.config)


@functools.cache
def para_mesh(world: int, **sizes: int) -> Any:
    """para-attn's mesh of all ranks; one is kept, since the threads of its groups outlive it."""
    from para_attn.context_parallel import init_context_parallel_mesh

    return init_context_parallel_mesh("cpu", **sizes) if world > 1 else None


_transformers = reused(make_transformer)


def run_para_case(rank: int, world: int, case: ParaCase) -> tuple[float, float]:
    """(largest difference from one process with the same mask, from dense attention), both on the whole output."""
    dense, expected = kept_from_rank_0(("pass", case.alone), lambda: pass_alone(case.model, case.inputs, case.config))
    with _transformers(case.model) as transformer, torch.no_grad():
        before = fingerprint(transformer)
        dbsp_para.parallelize_transformer(transformer, config=case.config)
        out = transformer(**case.inputs)[0]
        dbsp_para.unparallelize(transformer)
        assert fingerprint(transformer) == before, "unparallelize left something behind"
        assert torch.equal(transformer(**case.inputs)[0], dense)
    return float((out - expected).abs().max()), float((out - dense).abs().max())


def run_twice(rank: int, world: int, case: ParaCase) -> None:
    """Parallelized a second time, a transformer's first pass gives the same, by name as well."""
    transformer = make_transformer(case.model)
    outs = []
    for named in (False, True):
        dbsp_para.parallelize_transformer(transformer, config=case.config)
        with torch.no_grad():
            outs.append(transformer(**case.inputs | {"return_dict": named}))
        dbsp_para.unparallelize(transformer)
    assert type(outs[1]).__name__ == "Transformer2DModelOutput"
    assert torch.equal(outs[1].sample, outs[0][0])


def run_sparge_case(rank: int, world: int, case: ParaCase, steps: int = 3) -> list[tuple[float, float, float]]:
    """A few forward passes whose input is the last one's output, as in denoising, with masks predicted at each.

    returns: per pass, (largest difference from one process, from dense attention, mean density over layers)
    """
    expected = kept_from_rank_0(("passes", case.alone, steps), lambda: _passes_alone(case, steps))
    results = []
    with _transformers(case.model) as transformer, torch.no_grad():
        dbsp_para.parallelize_transformer(transformer, config=case.config)
        inputs = case.inputs
        for step, (dense, sparse) in enumerate(expected):
            inputs["timestep"] = _timestep(case, step)
            out = inputs["hidden_states"] = transformer(**inputs)[0]
            records = dbsp_para.session_of(transformer).records
            density = sum(record.density for record in records.values()) / len(records)
            results.append((float((out - sparse).abs().max()), float((out - dense).abs().max()), density))
        dbsp_para.unparallelize(transformer)
    return results


def _passes_alone(case: ParaCase, steps: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """By pass, (of dense attention, with the masks); the next one starts from the latter."""
    transformer, stock = make_transformer(case.model), make_transformer(case.model)
    attach_single_process(transformer, case.config)
    inputs, passes = case.inputs, []
    for step in range(steps):
        inputs["timestep"] = _timestep(case, step)
        with torch.no_grad():
            passes.append((stock(**inputs)[0], transformer(**inputs)[0]))
        inputs["hidden_states"] = passes[-1][1]
    return passes


def _timestep(case: ParaCase, step: int) -> torch.Tensor:
    return torch.full((case.batch,), 900 - 100 * step)


def run_through_para_attn(rank: int, world: int, ring: int, config: dict[str, Any]) -> float:
    """The same through para-attn's own function and device mesh, which also say the strategy."""
    from para_attn.context_parallel.diffusers_adapters import parallelize_transformer

    case = ParaCase("wan", (3, 5, 7), config)
    _, expected = kept_from_rank_0(("pass", case.alone), lambda: pass_alone(case.model, case.inputs, case.config))
    transformer = make_transformer("wan")
    with torch.no_grad():
        mesh = para_mesh(world, max_ring_dim_size=ring)
        parallelize_transformer(transformer, mesh=mesh, attn="dbsp", config=config)
        with pytest.raises(ValueError, match="parallelized already"):
            parallelize_transformer(transformer, mesh=mesh, attn="dbsp", config=config)
        out = transformer(**case.inputs)[0]
    return float((out - expected).abs().max())


_pipeline = functools.cache(load)


def run_pipeline_case(
    rank: int, world: int, model: str, folder: str, config: dict[str, Any]
) -> tuple[float, float, float]:
    """A whole tiny pipeline: (largest difference of the latents from one process, their sum, sum of unseeded ones)."""
    pipe = _pipeline(model, folder)
    cls = type(pipe)
    expected = kept_from_rank_0(("video", folder, mask_settings(config)), lambda: alone(pipe, config))
    dbsp_para.parallelize_pipe(pipe, config=config)
    out = latents(pipe)
    torch.manual_seed(rank)  # ranks would draw different noise
    unseeded = latents(pipe, seed=None, num_inference_steps=1)
    dbsp_para.unparallelize(pipe)
    assert type(pipe) is cls
    return float((out - expected).abs().max()), float(out.double().sum()), float(unseeded.double().sum())


class _Offloaded:
    """A pipeline whose weights wait elsewhere than it computes."""

    device = torch.device("cuda")
    _execution_device = torch.device("cpu")

    def __call__(self) -> torch.Tensor:
        return torch.randn(3, device=self._execution_device)


def unseeded_noise(rank: int, world: int) -> list[float]:
    """Noise of a call without a generator, under model offload."""
    pipe, attachment = _Offloaded(), PatchSet()
    Generations(pipe, SequenceGroup.from_group()).attach(attachment, lambda: None, shares_state=True)
    torch.manual_seed(rank)  # ranks would draw different noise
    noise = pipe()
    attachment.detach()
    return noise.tolist()


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
