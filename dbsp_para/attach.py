"""Parallelizes a diffusers pipeline or transformer on para-attn's device mesh, and undoes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from dbsp_core.config import ConfigLike
from dbsp_core.utils.errors import UserError
from dbsp_diffusers import disable, enable

Model = TypeVar("Model")


def parallelize_pipe(pipe: Model, *, mesh: Any = None, attn: str | None = "dbsp", config: ConfigLike = None) -> Model:
    """Shards a pipeline's transformer over the ranks of a mesh and balances its self-attention. Collective.

    In pipeline calls, all ranks use the first rank's random numbers.

    Args:
        pipe: A diffusers pipeline with one transformer.
        mesh: para-attn's device mesh with dimensions (batch, ring, ulysses), the first of size 1. None: all ranks
            share the sequence by Ulysses.
        attn: "dbsp"; use para-attn's own functions for other attention.
        config: A `DbspConfig`, a mapping, the path of a YAML file, a mask, or None for the settings shipped for the
            transformer's checkpoint (dense attention if there are none). Its strategy overrides the mesh.

    Returns:
        The pipeline.

    Raises:
        UserError: The mesh does not fit, or an error of `dbsp_diffusers.enable`; raised on all ranks, leaving the
            pipeline unchanged.
    """
    return parallelize_transformer(pipe, mesh=mesh, attn=attn, config=config)


def parallelize_transformer(
    transformer: Model,
    *,
    mesh: Any = None,
    attn: str | None = "dbsp",
    config: ConfigLike = None,
    steps: Callable[[], int | None] | None = None,
) -> Model:
    """Shards a transformer over the ranks of a mesh and balances its self-attention; see `parallelize_pipe`.

    Args:
        transformer: A diffusers transformer that db-SP supports.
        mesh: As for a pipeline.
        attn: As for a pipeline.
        config: As for a pipeline.
        steps: Returns the number of denoising steps, for settings that depend on it.

    Returns:
        The transformer.

    Raises:
        UserError: As for a pipeline.
    """
    if attn != "dbsp":
        raise UserError(
            f'unknown attn {attn!r}; pass attn="dbsp", or call para-attn\'s own function for its attention'
        )
    names = getattr(mesh, "mesh_dim_names", None) or ()
    groups = mesh.size(names.index("batch")) if "batch" in names else 1
    if groups > 1:  # like para-attn's attention
        raise UserError(
            f"the mesh splits the batch over {groups} groups of ranks, which db-SP does not support; make it with "
            "max_batch_dim_size=1, so that all ranks share every item"
        )
    enable(transformer, config, mesh=mesh, steps=steps, framework="para")
    return transformer


def unparallelize(model: Any) -> None:
    """Undoes `parallelize_pipe` or `parallelize_transformer`, restoring attributes, hooks and classes.

    Args:
        model: The pipeline or transformer, possibly compiled; if not parallelized, nothing happens.
    """
    disable(model)
