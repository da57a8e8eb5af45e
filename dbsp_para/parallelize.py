"""Parallelizing a diffusers pipeline or transformer on a process group or a para-attn mesh, and undoing it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from dbsp_core.architectures import architecture_of
from dbsp_core.config import ConfigLike
from dbsp_core.groups import SequenceGroup
from dbsp_core.hosts import Attachment, steps_of
from dbsp_core.in_force import announce, identify, settings_for
from dbsp_core.pipe_reports import model_name, report_calls
from dbsp_core.reporting import is_writer, make_report, write_report_files
from dbsp_core.session import AttentionSession
from dbsp_core.sharding import shard_transformer
from dbsp_core.strategy import Strategy
from dbsp_para.seeds import share_seeds

__all__ = ["parallelize_pipe", "parallelize_transformer", "unparallelize", "write_report"]

_attached: WeakKeyDictionary[nn.Module, tuple[Attachment, AttentionSession]] = WeakKeyDictionary()


def parallelize_pipe(pipe: Any, *, mesh: Any = None, config: ConfigLike = None) -> Any:
    """Parallelizes `pipe.transformer` (see there), and gives calls without a generator the same noise on every rank.

    returns: the pipe
    """
    if getattr(pipe, "transformer_2", None) is not None:
        raise ValueError("db-SP runs pipelines with one transformer, this one has two")
    config = settings_for(config, pipe.transformer, _ranks(mesh)[0], pipe=pipe)
    parallelize_transformer(pipe.transformer, mesh=mesh, config=config, steps=lambda: steps_of(pipe))
    attachment, session = _attached[pipe.transformer]
    share_seeds(pipe, session.group, attachment)
    report_calls(pipe, session, attachment, "para")
    return pipe


def parallelize_transformer(
    transformer: Any, *, mesh: Any = None, config: ConfigLike = None, steps: Callable[[], int | None] = lambda: None
) -> Any:
    """Shards the sequence over ranks between the first block and the projection, and balances self-attention.

    transformer: a diffusers WanTransformer3DModel or CogVideoXTransformer3DModel
    mesh:        para-attn's device mesh with dimensions (batch, ring, ulysses); default: all ranks, Ulysses alone
    config:      a DbspConfig, a mapping, the path of a YAML file, or None for the one shipped for
                 its checkpoint (dense for others); its strategy overrides the mesh's
    steps:       tells how many denoising steps there will be, for settings that depend on it
    returns:     the transformer
    Raises ValueError for an unknown or already parallelized transformer, or a strategy that does not fit the ranks.
    """
    architecture = architecture_of(transformer)
    if transformer in _attached or getattr(transformer, "_is_parallelized", False):
        raise ValueError("this transformer is parallelized already; undo that first (dbsp_para.unparallelize)")
    group, strategy = _ranks(mesh)
    config = settings_for(config, transformer, group)
    heads, layers = transformer.config.num_attention_heads, len(architecture.blocks_of(transformer))
    session = AttentionSession(config, group, config.strategy_or(strategy), heads, layers, steps)
    announce(config, identify(transformer), group, session.strategy, next(transformer.parameters()).device)
    attachment = Attachment()
    shard_transformer(transformer, session, attachment)
    attachment.set_attribute(transformer, "_is_parallelized", True)  # para-attn looks for it
    _attached[transformer] = attachment, session
    return transformer


def unparallelize(pipe: Any) -> None:
    """Undoes `parallelize_pipe`: attributes, hooks and classes are as before. `pipe` may be the transformer itself."""
    attachment, _ = _attached.pop(getattr(pipe, "transformer", pipe), (None, None))
    if attachment is not None:
        attachment.detach()


def write_report(pipe: Any, folder: str | os.PathLike[str] | None = None) -> None:
    """Writes what ran since it was parallelized, or since the last report, to `folder`. Collective; rank 0 writes.

    For a transformer without a pipeline, or one that para-attn's own functions parallelized: pipelines parallelized
    here report each of their calls.
    pipe:   a pipeline or transformer that was parallelized with setting `report`
    folder: default: that setting
    Raises ValueError where there is nothing to report, RuntimeError where a rank does not come.
    """
    transformer = getattr(pipe, "transformer", pipe)
    _, session = _attached.get(transformer, (None, None))
    if session is None or session.observer is None:
        raise ValueError("nothing was collected for a report; parallelize with config={'report': FOLDER, …}")
    name = model_name(pipe) if pipe is not transformer else type(transformer).__name__
    report = make_report(session, name, "para")
    if is_writer(session.group):
        write_report_files(report, session, Path(folder or session.config.report or "."))
    session.observer.restart()


def _ranks(mesh: Any) -> tuple[SequenceGroup, Strategy]:
    if mesh is None:
        group = SequenceGroup.of()
        return group, Strategy(group.size, 1)
    if mesh["batch"].size() != 1:
        raise ValueError("db-SP shards sequences, not batches; make the mesh with a batch dimension of 1")
    sequence = mesh["ring", "ulysses"]._flatten()
    return SequenceGroup.of(sequence.get_group()), Strategy(mesh["ulysses"].size(), mesh["ring"].size())
