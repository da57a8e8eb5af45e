"""Parallelizing a diffusers pipeline or transformer on a process group or a para-attn mesh, and undoing it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config.config import ConfigLike
from dbsp_core.reports.collect import is_writer, make_report, write_report_files
from dbsp_core.reports.observed import observed_session
from dbsp_core.reports.observer import run_observer
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.architectures import architecture_of
from dbsp_diffusers.attached import get_session, keep, release
from dbsp_diffusers.batch_parallel import split_batch
from dbsp_diffusers.checks import check_not_compiled
from dbsp_diffusers.effective_config import identify, log_config, resolve_config
from dbsp_diffusers.patching import PatchSet, around_calls, current_generation_id, num_inference_steps_of
from dbsp_diffusers.report_hook import model_name, report_calls
from dbsp_diffusers.sequence_parallel import shard_transformer
from dbsp_para.first_block_cache import Parallelized
from dbsp_para.mesh import Ranks

__all__ = ["parallelize_pipe", "parallelize_transformer", "session_of", "share_seeds", "unparallelize", "write_report"]

_CPU = torch.device("cpu")


def share_seeds(pipe: Any, group: SequenceGroup, attachment: PatchSet) -> None:
    """Gives calls without `generator` one that all ranks of `group` seed alike, with their first rank's draw.

    The noise is what diffusers draws with that generator on the device that the pipeline computes on, which may be
    another than the one its weights wait on: under CPU offload. Collective at once.
    """
    control = group.control()

    def around(call: Callable[..., Any]) -> Callable[..., Any]:
        def with_generator(*args: Any, generator: Any = None, **kwargs: Any) -> Any:
            if generator is None:
                drawn = int(torch.randint(0, 2**62, (1,)))
                seed = control.gather_integers([drawn], _CPU)[0][0]
                generator = torch.Generator(_device_of(pipe)).manual_seed(seed)
            return call(*args, generator=generator, **kwargs)

        return with_generator

    around_calls(pipe, around, attachment)


def _device_of(pipe: Any) -> torch.device:
    """Where a pipeline draws its noise: the device that it computes on, where it says so."""
    device: torch.device = getattr(pipe, "_execution_device", None) or pipe.device
    return device


def parallelize_pipe(pipe: Any, *, mesh: Any = None, config: ConfigLike = None) -> Any:
    """Parallelizes `pipe.transformer` (see there), and gives calls without a generator the same noise on every rank.

    returns: the pipe
    Raises ValueError as `parallelize_transformer` does, and for a pipeline without a transformer or with two.
    """
    if getattr(pipe, "transformer", None) is None:
        raise UserError(f"db-SP parallelizes pipelines with a transformer, {type(pipe).__name__} has none")
    if getattr(pipe, "transformer_2", None) is not None:
        raise UserError("db-SP runs pipelines with one transformer, this one has two")
    ranks = Ranks.of(mesh)
    with PatchSet() as attachment:
        session = _parallelize(pipe.transformer, ranks, config, attachment, lambda: num_inference_steps_of(pipe), pipe)
        share_seeds(pipe, ranks.everyone, attachment)
        report_calls(pipe, session, attachment, "para")
        keep(pipe.transformer, attachment, session)
    return pipe


def parallelize_transformer(
    transformer: Any, *, mesh: Any = None, config: ConfigLike = None, steps: Callable[[], int | None] = lambda: None
) -> Any:
    """Shards the sequence over ranks between embedding and projection, and balances self-attention.

    transformer: a diffusers WanTransformer3DModel or CogVideoXTransformer3DModel
    mesh:        para-attn's device mesh with dimensions (batch, ring, ulysses); default: all ranks, Ulysses alone
    config:      a DbspConfig, a mapping, the path of a YAML file, or None for the settings shipped for the
                 transformer's checkpoint, dense where none are shipped; its strategy overrides the mesh's
    steps:       tells how many denoising steps there will be, for settings that depend on it
    returns:     the transformer
    Called by all ranks of the mesh together. Raises ValueError, on all of them, for an unknown or already parallelized
    transformer, one with another attention backend, a mesh or strategy that does not fit, and a config that makes no
    sense or differs between ranks. The transformer is then as it was.
    """
    ranks = Ranks.of(mesh)
    with PatchSet() as attachment:
        session = _parallelize(transformer, ranks, config, attachment, steps)
        keep(transformer, attachment, session)
    return transformer


def unparallelize(pipe: Any) -> None:
    """Undoes `parallelize_pipe`: attributes, hooks and classes are as before. `pipe` may be the transformer itself."""
    release(getattr(pipe, "transformer", pipe))


def session_of(pipe: Any) -> AttentionSession | None:
    """The session of a parallelized pipeline or transformer, if any: its plans, strategies and counters."""
    return get_session(getattr(pipe, "transformer", pipe))


def write_report(pipe: Any, folder: str | os.PathLike[str] | None = None) -> None:
    """Writes what ran since it was parallelized, or since the last report, to `folder`. Collective; rank 0 writes.

    For a transformer without a pipeline: pipelines report each of their calls.
    pipe:   a pipeline or transformer that was parallelized with setting `report`
    folder: default: that setting
    Raises ValueError where there is nothing to report, RuntimeError where a rank does not come.
    """
    session = session_of(pipe)
    observer = None if session is None else run_observer(session)
    if session is None or observer is None:
        raise UserError("nothing was collected for a report; parallelize with config={'report': FOLDER, …}")
    name = model_name(pipe) if hasattr(pipe, "transformer") else type(getattr(pipe, "_orig_mod", pipe)).__name__
    report = make_report(session, name, "para")
    if is_writer(session.group):
        write_report_files(report, session, Path(folder or observer.folder))
    observer.restart()


def _parallelize(
    transformer: Any,
    ranks: Ranks,
    config: ConfigLike,
    attachment: PatchSet,
    steps: Callable[[], int | None],
    pipe: Any = None,
) -> AttentionSession:
    """All changes to the transformer."""
    if any(cls.__name__.startswith("xFuser") for cls in type(transformer).__mro__):
        raise UserError(f"{type(transformer).__name__} is xDiT's and shards by itself; use dbsp_xdit.attach(pipe)")
    check_not_compiled(transformer)
    architecture = architecture_of(transformer)
    heads, layers = transformer.config.num_attention_heads, len(architecture.blocks_of(transformer))
    config = resolve_config(config, transformer, ranks.everyone, pipe=pipe)
    strategy = config.strategy_or(ranks.strategy)
    session = observed_session(
        config, ranks.sequence, strategy, heads, layers, steps, generation=lambda: current_generation_id(pipe)
    )
    device = next(transformer.parameters()).device
    log_config(config, identify(transformer, pipe), ranks.everyone, strategy, device)
    batch = split_batch(transformer, ranks.batch, attachment)
    sharding = shard_transformer(transformer, session, attachment, batch)
    attachment.set_attribute(transformer, "_is_parallelized", Parallelized(sharding.together))
    return session
