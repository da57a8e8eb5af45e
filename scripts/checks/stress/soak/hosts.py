"""db-SP put on transformers and pipelines by each of the hosts, and taken off again."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import dbsp_diffusers
import dbsp_para
from tests.xdit.xdit_cases import hosted_transformer

Detach = Callable[[], None]


def transformer_of(host: str, model: str) -> Any:
    """With the same weights every time; Wan in xfuser's wrapper where xfuser is the host."""
    from tests.support.models.tiny_transformers import make_tiny_transformer

    return hosted_transformer(model) if (host, model) == ("xdit", "wan") else make_tiny_transformer(model)


def attach_transformer(host: str, transformer: Any, config: Mapping[str, Any], world: int) -> Detach:
    if host == "diffusers":
        dbsp_diffusers.enable(transformer, config)
    elif host == "para":
        dbsp_para.parallelize_transformer(transformer, config=config)
    elif host == "para-attn":
        from para_attn.context_parallel.diffusers_adapters import parallelize_transformer

        parallelize_transformer(transformer, mesh=_mesh(world), attn="dbsp", config=config)
    else:
        return attach_pipe(host, types.SimpleNamespace(transformer=transformer), config, world)
    return lambda: dbsp_diffusers.disable(transformer)


def attach_pipe(host: str, pipe: Any, config: Mapping[str, Any], world: int) -> Detach:
    if host == "xdit":
        from dbsp_xdit import attach, detach

        attach(pipe, config)
        return lambda: detach(pipe)
    if host == "para":
        dbsp_para.parallelize_pipe(pipe, config=config)
        return lambda: dbsp_para.unparallelize(pipe)
    if host == "para-attn":
        from para_attn.context_parallel.diffusers_adapters import parallelize_pipe

        parallelize_pipe(pipe, mesh=_mesh(world), attn="dbsp", config=config)
        return lambda: dbsp_para.unparallelize(pipe)
    dbsp_diffusers.enable(pipe, config)
    return lambda: dbsp_diffusers.disable(pipe)


_meshes: dict[int, Any] = {}


def _mesh(world: int) -> Any:
    """para-attn's, a ring of all ranks: one for the process, as a user has it. Each makes process groups."""
    from para_attn.context_parallel import init_context_parallel_mesh

    if world not in _meshes:
        _meshes[world] = init_context_parallel_mesh("cpu", max_ring_dim_size=world)
    return _meshes[world]
