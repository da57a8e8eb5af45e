"""What the workers run: pipelines that db-SP must reject in xDiT, and generations that fail."""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import nn

from tests.support.models.transformers_for_tests import Inputs, make_transformer
from tests.support.references import kept_from_rank_0
from tests.xdit.xdit_cases import (
    PipelineCase,
    engine_config,
    expected_latents,
    hosted_transformer,
    latents_of,
    load_cogvideox,
)


def attach_error(rank: int, world: int, kind: str, config: dict[str, Any]) -> str:
    """The message of the ValueError that attaching raises. No collective is answered meanwhile: none may be asked.

    Comparing problems and settings is one, on all ranks and before anything is decided by them; that has tests of
    its own.
    """
    from dbsp_core.comm.groups import SequenceGroup
    from dbsp_core.config import DbspConfig
    from dbsp_xdit import attach

    def rejected(*_: Any, **__: Any) -> Any:
        raise AssertionError("a collective before the error")

    def compared(_: Any, problem: Exception | None, *__: Any, numbers: Sequence[int] = ()) -> list[Sequence[int]]:
        if problem is not None:
            raise problem
        return [numbers]

    pipe = PIPES[kind]()
    with (
        mock.patch("dbsp_core.comm.consistency.check_consistent", compared),
        mock.patch("dbsp_core.runtime.consistency_checks.check_consistent", compared),
        mock.patch("dbsp_diffusers.attach.use_model_device"),
        mock.patch("dbsp_core.runtime.consistency_checks.number_nodes", lambda group, fingerprints: [0] * group.size),
        mock.patch("dbsp_diffusers.attach.resolve_config", lambda given, *_, **__: DbspConfig.load(given)),
        mock.patch.multiple(SequenceGroup, all_gather=rejected, all_to_all=rejected),
    ):
        try:
            attach(pipe, config)
        except ValueError as error:
            return str(error)
    return ""


def _pipe(transformer: Any, **others: Any) -> Any:
    return types.SimpleNamespace(transformer=transformer, **others)


def _by_diffusers() -> Any:
    from diffusers import ContextParallelConfig

    transformer = make_transformer("wan")
    world = torch.distributed.get_world_size()
    with mock.patch.object(torch.accelerator, "device_count", return_value=world):
        transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=world))
    return _pipe(transformer)


def _by_para_attn() -> Any:
    from para_attn.context_parallel import init_context_parallel_mesh
    from para_attn.context_parallel.diffusers_adapters import parallelize_transformer

    transformer = make_transformer("cogvideox1.0")
    parallelize_transformer(transformer, mesh=init_context_parallel_mesh("cpu"))
    return _pipe(transformer)


def _unknown_of_xfuser() -> Any:
    stock = type("StrangeTransformer3DModel", (nn.Identity,), {"__module__": "diffusers.strange"})
    return _pipe(type("xFuserStrangeTransformer3DWrapper", (stock,), {"__module__": "xfuser.strange"})())


def _cached_before() -> Any:
    transformer = hosted_transformer("wan")
    transformer.forward = functools.partial(transformer.forward)  # as cache-dit does
    return _pipe(transformer)


def kept_forward(rank: int, world: int) -> tuple[bool, bool]:
    """Whether a forward that a library keeps from before `detach` is the transformer's own afterwards, and is gone."""
    from dbsp_xdit import attach, detach

    pipe = _pipe(hosted_transformer("wan"))
    attach(pipe, {})
    kept = pipe.transformer.forward
    detach(pipe)
    cls: Any = type(pipe.transformer)
    with mock.patch.object(cls, "forward", return_value="own"):
        return kept() == "own", "forward" not in vars(pipe.transformer)


PIPES = {
    "stock": lambda: _pipe(make_transformer("wan")),
    "wrapper": lambda: _pipe(hosted_transformer("wan")),
    "by diffusers": _by_diffusers,
    "by para-attn": _by_para_attn,
    "unknown": lambda: _pipe(nn.Identity()),
    "unknown of xfuser": _unknown_of_xfuser,
    "cogvideox": lambda: _pipe(make_transformer("cogvideox")),
    "cached before": _cached_before,
}


def run_until_error(rank: int, world: int, model: str, config: dict[str, Any]) -> str:
    """The message of the ValueError that a forward pass raises; afterwards a pass with dense masks is right."""
    from dbsp_xdit import attach, detach

    pipe = _pipe(hosted_transformer(model))
    inputs = Inputs.random(model, (3, 5, 7), 1, 7).arguments
    message = ""
    with torch.no_grad():
        attach(pipe, config)
        try:
            pipe.transformer(**inputs)
        except ValueError as error:
            message = str(error)
        detach(pipe)
        attach(pipe, {})
        out = pipe.transformer(**inputs)[0]
        detach(pipe)
        assert float((out - make_transformer(model)(**inputs)[0]).abs().max()) <= 1e-5
    return message


class _Broken(Exception):
    """What goes wrong in a generation."""


def fail_then_generate(rank: int, world: int, case: PipelineCase, where: str) -> float:
    """Largest difference from one process of a generation after one that failed on all ranks."""
    from dbsp_xdit import attach

    pipe = load_cogvideox(case.folder)
    expected = kept_from_rank_0((case.folder, case.config, case.height), lambda: expected_latents(case))
    if case.own:
        from xfuser import xFuserCogVideoXPipeline

        pipe = xFuserCogVideoXPipeline(pipe, engine_config(world))
    attach(pipe, case.config)
    fail = {"in a layer": _fail_in_a_layer, "between steps": _fail_between_steps}[where]
    try:
        fail(pipe, case)
    except _Broken:
        return float((latents_of(pipe, case) - expected).abs().max())
    raise AssertionError("the first generation was to fail")


def _fail_in_a_layer(pipe: Any, case: PipelineCase) -> None:
    def break_off(*_: Any) -> None:
        raise _Broken

    hook = pipe.transformer.transformer_blocks[1].ff.register_forward_hook(break_off)
    try:
        latents_of(pipe, case)
    finally:
        hook.remove()


def _fail_between_steps(pipe: Any, case: PipelineCase) -> None:
    def break_off(*_: Any) -> Any:
        raise _Broken

    latents_of(pipe, replace(case, num_frames=17), callback_on_step_end=break_off)  # of another size, in addition
