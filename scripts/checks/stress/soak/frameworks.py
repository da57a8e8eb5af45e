"""db-SP enabled on transformers and pipelines by each framework, and disabled again."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import dbsp_diffusers
import dbsp_para
from tests.xdit.xdit_cases import hosted_transformer

Detach = Callable[[], None]


def transformer_of(framework: str, model: str) -> Any:
    """Makes a transformer with the same weights every time; Wan in xfuser's wrapper where xfuser is the framework."""
    from tests.support.models.tiny_transformers import make_tiny_transformer

    return hosted_transformer(model) if (framework, model) == ("xdit", "wan") else make_tiny_transformer(model)


def attach_transformer(framework: str, transformer: Any, config: Mapping[str, Any], world: int) -> Detach:
    if framework == "diffusers":
        dbsp_diffusers.enable(transformer, config)
    elif framework == "para":
        dbsp_para.parallelize_transformer(transformer, config=config)
    elif framework == "para-attn":
        from para_attn.context_parallel.diffusers_adapters import parallelize_transformer

        parallelize_transformer(transformer, mesh=_mesh(world), attn="dbsp", config=config)
    else:
        return attach_pipe(framework, types.SimpleNamespace(transformer=transformer), config, world)
    return lambda: dbsp_diffusers.disable(transformer)


def attach_pipe(framework: str, pipe: Any, config: Mapping[str, Any], world: int) -> Detach:
    if framework == "xdit":
        from dbsp_xdit import attach, detach

        attach(pipe, config)
        return lambda: detach(pipe)
    if framework == "para":
        dbsp_para.parallelize_pipe(pipe, config=config)
        return lambda: dbsp_para.unparallelize(pipe)
    if framework == "para-attn":
        from para_attn.context_parallel.diffusers_adapters import parallelize_pipe

        parallelize_pipe(pipe, mesh=_mesh(world), attn="dbsp", config=config)
        return lambda: dbsp_para.unparallelize(pipe)
    dbsp_diffusers.enable(pipe, config)
    return lambda: dbsp_diffusers.disable(pipe)


_meshes: dict[int, Any] = {}


def _mesh(world: int) -> Any:
    """Returns para-attn's mesh, a ring of all ranks: one for the process, because each makes process groups."""
    from para_attn.context_parallel import init_context_parallel_mesh

    if world not in _meshes:
        _meshes[world] = init_context_parallel_mesh("cpu", max_ring_dim_size=world)
    return _meshes[world]
