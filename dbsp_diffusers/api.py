"""The public functions: db-SP enabled and disabled on diffusers' pipelines, its sessions and reports."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch.distributed import ProcessGroup

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

Group = ProcessGroup | SequenceGroup | None
_DIMENSIONS = ("ring", "ulysses")


def enable(
    model: Any,
    config: ConfigLike = None,
    *,
    mesh: Any = None,
    group: Group = None,
    strategy: Strategy | str | None = None,
    guidance: bool = False,
    vae: bool = False,
    steps: Callable[[], int | None] | None = None,
    framework: str = "diffusers",
) -> AttentionSession:
    """Shards a diffusers pipeline's transformer over ranks, with dual-balanced block-sparse self-attention.

    Every rank is given the whole input and returns the whole output. Text, where it is in the same sequence, is
    sharded like video. In a pipeline's calls all ranks draw the first rank's random numbers. Call it on all ranks
    together; without torch.distributed it is one process with sparse attention.

    Args:
        model: A pipeline with a `transformer`, and maybe others that take turns with it (Wan2.2's `transformer_2`), or
            such a transformer, of a class that db-SP knows.
        config: A `DbspConfig`, a mapping, the path of a YAML file, the name of a shipped one, or a mask alone, such as
            "sparge:cdf=0.92" or a function (see docs/masks.md). None: the settings shipped for the transformer's
            checkpoint, dense attention where none are shipped.
        mesh: A `DeviceMesh` with dimensions "ring" and "ulysses", or one of them, in addition to any others: the ranks
            that share a sequence, and how. Default: all ranks.
        group: The ranks that share a sequence, instead of a mesh. Default: all ranks.
        strategy: Strategy of the ranks of a sequence, for example "U4R2", if the configuration does not name it.
            Default: Ulysses on all of them.
        guidance: True if each half of the ranks computes one of a step's two CFG passes; `strategy` and the session
            are then those of a half. For pipelines whose calls have guidance, such as Wan's, Qwen-Image's and
            CogVideoX's; without gradients, packed passes, and most step caches.
        vae: True if the ranks that make a video also decode it together, tile by tile: turns the autoencoder's tiling
            on, and shares its tiles out. Setting `vae` of the configuration does so, too.
        steps: Returns the number of denoising steps, for settings that depend on it; a pipeline says it itself.
        framework: The name of the caller in reports.

    Returns:
        The session: its plans, strategies and statistics. Of two transformers that of the first; see `sessions_of`.

    Raises:
        UserError: On all ranks together, for a transformer that is unknown, parallelized already, spread over several
            GPUs or another one than on other ranks, or a mesh, strategy or configuration that does not fit or differs
            between ranks. The model is then as it was.
    """
    if group is not None and mesh is not None:
        raise UserError("mesh and group both name the ranks that share a sequence; give one of them")
    if guidance is not False and mesh is not None:
        raise UserError("guidance halves the ranks, and a mesh says how all of them are used; give group instead")
    sequence, of_mesh = (SequenceGroup.from_group(group), None) if mesh is None else ranks_of_mesh(mesh)
    halves = None
    if guidance is not False:
        from dbsp_diffusers.sharding.guidance import Halves

        halves = Halves.of(guidance, model, sequence)
        sequence = halves.half

    def choose_strategy(config: DbspConfig) -> Strategy | None:
        default = of_mesh or Strategy(sequence.size, 1)
        return config.strategy_or(default if strategy is None else Strategy.parse(strategy))

    whole = Framework(
        name=framework,
        sequence=sequence,
        choose_strategy=choose_strategy,
        vae=vae,
        halves=halves,
    )
    return attach_framework(model, config, whole, steps)


def ranks_of_mesh(mesh: Any) -> tuple[SequenceGroup, Strategy]:
    """Returns the ranks along the dimensions "ring" and "ulysses" of a device mesh, and the strategy of its sizes.

    One of the two dimensions may be missing, and the mesh may have others. Collective. Raises UserError, on all
    ranks, for any other mesh, and on a rank outside the mesh.
    """
    names = getattr(mesh, "mesh_dim_names", None) or ()
    present = [name for name in names if name in _DIMENSIONS]
    if not present:
        what = f"dimensions {', '.join(names)}" if names else f"a {type(mesh).__name__} without such names"
        raise UserError(f"mesh must be a device mesh with a dimension ring or ulysses, got {what}")
    if present == ["ulysses", "ring"]:
        raise UserError("the mesh's dimension ring must come before ulysses, as in diffusers' own meshes")
    if mesh.get_coordinate() is None:
        raise UserError("this rank is outside the mesh; enable db-SP on the mesh's ranks only")
    part = mesh[tuple(present)]
    group = (part._flatten() if len(present) > 1 else part).get_group()
    degrees = {name: mesh[name].size() for name in present}
    return SequenceGroup.from_group(group), Strategy(degrees.get("ulysses", 1), degrees.get("ring", 1))


def disable(model: Any) -> None:
    """Undoes `enable`: attributes, hooks and classes are as before. Nothing happens where nothing is enabled.

    Args:
        model: The pipeline, or its transformer, compiled since or not.
    """
    for state in all_attached_to(model):
        state.patches.detach()


def sessions_of(model: Any) -> dict[str, AttentionSession]:
    """Returns the sessions of an enabled pipeline.

    Args:
        model: The pipeline.

    Returns:
        By the pipeline's name of each transformer, such as "transformer" and "transformer_2", its session. Empty where
        db-SP is not enabled.
    """
    sessions = {name: session_of(transformer) for name, transformer in transformers_in(model).items()}
    return {name: session for name, session in sessions.items() if session is not None}


def write_report(model: Any, folder: str | os.PathLike[str] | None = None) -> None:
    """Writes a report of what ran since db-SP was enabled, or since the last report; rank 0 writes.

    For a transformer without a pipeline: pipelines report each of their calls. Call it on all ranks together.

    Args:
        model: A pipeline or transformer that was enabled with setting `report`.
        folder: Folder of the report. Default: the folder of that setting.

    Raises:
        UserError: If there is nothing to report, or a rank does not take part.
    """
    state = attached_to(model)
    observer = None if state is None else run_observer(state.first)
    if state is None or observer is None:
        raise UserError("nothing was collected for a report; enable db-SP with config={'report': FOLDER, …}")
    name = model_name(model) if hasattr(model, "transformer") else type(getattr(model, "_orig_mod", model)).__name__
    write_run_report(list(state.sessions.values()), name, state.framework, folder)
    observer.restart()
