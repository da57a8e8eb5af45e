"""The public functions for diffusers pipelines: `enable`, `disable`, sessions, gradients and reports."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config import ConfigLike, DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.reports.observer import run_observer
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.attach import Framework, attach_framework
from dbsp_diffusers.attached import all_attached_to, attached_to, session_of
from dbsp_diffusers.models.transformers import transformers_in
from dbsp_diffusers.report_hook import model_name, write_run_report


def enable(
    model: Any,
    config: ConfigLike = None,
    *,
    mesh: Any = None,
    group: ProcessGroup | SequenceGroup | None = None,
    strategy: Strategy | str | None = None,
    guidance: bool = False,
    vae: bool = False,
    steps: Callable[[], int | None] | None = None,
    framework: str = "diffusers",
) -> AttentionSession:
    """Shards a diffusers pipeline's transformer over ranks with dual-balanced block-sparse attention. Collective.

    Every rank takes the whole input and returns the whole output. Text in the same sequence is sharded like video. In
    pipeline calls, all ranks use the first rank's random numbers. Without torch.distributed, runs sparse attention in
    a single process.

    Args:
        model: A pipeline with a `transformer` (and optionally others, such as Wan2.2's `transformer_2`), or a
            transformer of a class that db-SP supports.
        config: A `DbspConfig`, a mapping, the path of a YAML file, the name of a shipped one, or a mask such as
            "sparge:cdf=0.92" or a function (see docs/masks.md). None: the settings shipped for the transformer's
            checkpoint, or dense attention if there are none.
        mesh: A `DeviceMesh` with dimensions "ring" and "ulysses", or one of them (others are allowed): the ranks that
            share a sequence, and their strategy. None: all ranks.
        group: The ranks that share a sequence, instead of a mesh. None: all ranks.
        strategy: Strategy of the ranks of a sequence, such as "U4R2", unless set in the configuration. None: Ulysses
            on all of them.
        guidance: True to compute each of a step's two CFG passes on one half of the ranks; `strategy` and the session
            are then those of a half. For pipelines with guidance in every call, such as Wan, Qwen-Image and CogVideoX.
            Excludes gradients, packed passes and most step caches.
        vae: True to decode the video on all its ranks together, tile by tile; enables the autoencoder's tiling. Same
            as setting `vae`.
        steps: Returns the number of denoising steps, for settings that depend on it; not needed for pipelines.
        framework: Name of the caller, used in reports.

    Returns:
        The session, with plans, strategies and statistics; for two transformers that of the first (see `sessions_of`).

    Raises:
        UserError: The transformer is unknown, already parallelized, on several GPUs or different on other ranks, or a
            mesh, strategy or configuration does not fit or differs between ranks. Raised on all ranks, leaving the
            model unchanged.
    """
    if group is not None and mesh is not None:
        raise UserError("mesh and group both set the ranks that share a sequence; pass one of them")
    if guidance is not False and mesh is not None:
        raise UserError("guidance splits the ranks into halves, which mesh does not support; pass group instead")
    sequence, of_mesh = (SequenceGroup.from_group(group), None) if mesh is None else ranks_of_mesh(mesh)
    halves = None
    if guidance is not False:
        from dbsp_diffusers.sharding.guidance import Halves

        halves = Halves.of(guidance, model, sequence)
        sequence = halves.half

    def choose_strategy(config: DbspConfig) -> Strategy | None:
        default = of_mesh or Strategy(sequence.size, 1)
        return config.strategy_or(default if strategy is None else Strategy.parse(strategy))

    return attach_framework(model, config, Framework(framework, sequence, choose_strategy, vae, halves=halves), steps)


def ranks_of_mesh(mesh: Any) -> tuple[SequenceGroup, Strategy]:
    """Returns the ranks and strategy of a device mesh's dimensions "ring" and "ulysses". Collective.

    One of the two may be missing, and the mesh may have other dimensions. Raises UserError on all ranks for other
    meshes, and on a rank outside the mesh.
    """
    names = getattr(mesh, "mesh_dim_names", None) or ()
    present = [name for name in names if name in ("ring", "ulysses")]
    if not present:
        actual = f"dimensions {', '.join(names)}" if names else f"a {type(mesh).__name__} without such names"
        raise UserError(f"mesh must be a device mesh with a dimension ring or ulysses, got {actual}")
    if present == ["ulysses", "ring"]:
        raise UserError("the mesh's dimension ring must come before ulysses, as in diffusers' own meshes")
    if mesh.get_coordinate() is None:
        raise UserError("this rank is outside the mesh; enable db-SP on the mesh's ranks only")
    part = mesh[tuple(present)]
    group = (part._flatten() if len(present) > 1 else part).get_group()
    degrees = {name: mesh[name].size() for name in present}
    return SequenceGroup.from_group(group), Strategy(degrees.get("ulysses", 1), degrees.get("ring", 1))


def disable(model: Any) -> None:
    """Undoes `enable`, restoring attributes, hooks and classes.

    Args:
        model: The pipeline or transformer, possibly compiled; if db-SP is not enabled, nothing happens.
    """
    for state in all_attached_to(model):
        state.patches.detach()


def sessions_of(model: Any) -> dict[str, AttentionSession]:
    """Returns the sessions of an enabled pipeline.

    Args:
        model: The pipeline.

    Returns:
        The session of each transformer by its name in the pipeline, such as "transformer" and "transformer_2". Empty
        if db-SP is not enabled.
    """
    sessions = {name: session_of(transformer) for name, transformer in transformers_in(model).items()}
    return {name: session for name, session in sessions.items() if session is not None}


def write_report(model: Any, folder: str | os.PathLike[str] | None = None) -> None:
    """Writes a report of everything since `enable` or the last report, on rank 0. Collective.

    For transformers without a pipeline; pipelines report each of their calls.

    Args:
        model: A pipeline or transformer enabled with setting `report`.
        folder: Folder of the report. None: the folder of that setting.

    Raises:
        UserError: There is nothing to report, or a rank does not take part.
    """
    state = attached_to(model)
    observer = None if state is None else run_observer(state.first)
    if state is None or observer is None:
        raise UserError("no report was requested; enable db-SP with config={'report': FOLDER, …}")
    name = model_name(model) if hasattr(model, "transformer") else type(getattr(model, "_orig_mod", model)).__name__
    write_run_report(list(state.sessions.values()), name, state.framework, folder)
    observer.restart()


def sum_gradients(model: Any) -> None:
    """Sums the gradients of a transformer's parameters over the ranks of the sequence. Collective.

    Every rank computes the whole loss, but gradients from its own tokens only. Call this after `backward` and before
    clipping or the optimizer's step. With data parallelism, average over the data group as usual, before or after.
    FSDP2 over the sequence's ranks has already averaged its parameters' gradients; they are scaled back to the sum.

    Args:
        model: A pipeline or transformer with db-SP enabled.

    Raises:
        UserError: db-SP is not enabled.
    """
    state = attached_to(model)
    if state is None:
        raise UserError("sum_gradients needs a model with db-SP enabled; call dbsp_diffusers.enable first")
    group = state.first.group
    if group.size == 1 or group.alone:
        return
    ranks = set(dist.get_process_group_ranks(group.group))
    # two transformers may share parameters
    parameters = dict.fromkeys(p for part in transformers_in(model).values() for p in part.parameters())
    grads = [p.grad for p in parameters if p.grad is not None]
    summed = []
    for grad in grads:
        if not isinstance(grad, DTensor):
            summed.append(grad)
        elif ranks <= set(grad.device_mesh.mesh.flatten().tolist()):
            grad.to_local().mul_(group.size)
        else:
            summed.append(grad.to_local())
    for bucket in _buckets(summed):
        flat = _flatten_dense_tensors(bucket)
        dist.all_reduce(flat, group=group.group)
        for grad, total in zip(bucket, _unflatten_dense_tensors(flat, bucket), strict=True):
            grad.copy_(total)


def _buckets(grads: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Groups gradients by dtype and device into buckets of 64 MiB, identically on all ranks."""
    waiting: dict[object, list[torch.Tensor]] = {}
    for grad in grads:
        bucket = waiting.setdefault((grad.dtype, grad.device), [])
        bucket.append(grad)
        if sum(gradient.nbytes for gradient in bucket) >= 64 << 20:
            yield waiting.pop((grad.dtype, grad.device))
    yield from waiting.values()
