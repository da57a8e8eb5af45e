"""Parallelizes a diffusers pipeline or transformer on para-attn's device mesh, and undoes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from dbsp_core.config import ConfigLike
from dbsp_core.utils.errors import UserError
from dbsp_diffusers import disable, enable

Model = TypeVar("Model")


def parallelize_pipe(pipe: Model, *, mesh: Any = None, attn: str | None = "dbsp", config: ConfigLike = None) -> Model:
    """Shards a pipeline's transformer over the ranks of a mesh, and balances its self-attention.

    In a pipeline's calls all ranks draw the first rank's random numbers. Call it on all ranks of the mesh together.

    Args:
        pipe: A diffusers pipeline with one transformer.
        mesh: para-attn's device mesh with dimensions (batch, ring, ulysses), the first of size 1. Default: all ranks
            share the sequence, by Ulysses only.
        attn: "dbsp"; para-attn's own functions have the others.
        config: A `DbspConfig`, a mapping, the path of a YAML file, a mask alone, or None for the settings shipped for
            the transformer's checkpoint, dense attention where none are shipped. Its strategy overrides the mesh's.

    Returns:
        The pipeline.

    Raises:
        UserError: On all ranks, for a mesh that does not fit, and as `dbsp_diffusers.enable` does. The pipeline is
            then as it was.
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
    """Shards a transformer over the ranks of a mesh, and balances its self-attention; see `parallelize_pipe`.

    Args:
        transformer: A diffusers transformer that db-SP knows: Wan's, CogVideoX's, or a registered one.
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
    if groups > 1:  # as para-attn's own attention splits it
        raise UserError(
            f"the mesh splits the batch over {groups} groups of ranks, and db-SP does not; make it with "
            "max_batch_dim_size=1, and all ranks share every item"
        )
    enable(transformer, config, mesh=mesh, steps=steps, framework="para")
    return transformer


def unparallelize(model: Any) -> None:
    """Undoes either: attributes, hooks and classes are as before. Nothing happens where nothing is parallelized.

    Args:
        model: The pipeline, or its transformer, compiled since or not.
    """
    disable(model)
