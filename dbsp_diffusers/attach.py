"""db-SP on diffusers' transformers: attached, detached, and what it did."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config.config import ConfigLike, DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.reports.collect import is_writer, make_report, write_report_files
from dbsp_core.reports.observed import observed_session
from dbsp_core.reports.observer import run_observer
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.architectures import architecture_of
from dbsp_diffusers.attention.checks import check_not_compiled, check_not_parallelized
from dbsp_diffusers.effective_config import identify, log_config, resolve_config
from dbsp_diffusers.patching import PatchSet, around_calls, current_generation_id, num_inference_steps_of
from dbsp_diffusers.report_hook import model_name, report_calls
from dbsp_diffusers.sharding.batch_parallel import split_batch
from dbsp_diffusers.sharding.sequence_parallel import shard_transformer

__all__ = ["Host", "attach_host", "disable", "enable", "session_of", "share_seeds", "transformer_of", "write_report"]

Group = ProcessGroup | SequenceGroup | None

_CPU = torch.device("cpu")
_STATE = "_dbsp"
"""Attribute of a transformer: on it, rather than in a table here, so that both are freed together."""


def enable(
    model: Any,
    config: ConfigLike = None,
    *,
    group: Group = None,
    batch_group: Group = None,
    everyone: Group = None,
    strategy: Strategy | str | None = None,
    steps: Callable[[], int | None] | None = None,
    host: str = "diffusers",
) -> AttentionSession:
    """Shards a diffusers pipeline's transformer over ranks, with dual-balanced block-sparse self-attention.

    Every rank is given the whole input and returns the whole output. Text, where it is in the same sequence, is
    sharded like video. Calls of a pipeline without `generator=` draw the same noise on all ranks. Call it on all ranks
    together, before `torch.compile`; without torch.distributed it is one process with sparse attention.

    Args:
        model: A pipeline with a `transformer`, or such a transformer: Wan's, CogVideoX's, or a registered one.
        config: A `DbspConfig`, a mapping, the path of a YAML file or the name of a shipped one. None: the settings
            shipped for the transformer's checkpoint, dense attention where none are shipped.
        group: The ranks that share a sequence. Default: all ranks.
        batch_group: The ranks that hold the same part of the sequence and share out the items of a batch. Default:
            the batch is not shared out.
        everyone: With `batch_group`, the ranks that make one video together. Default: all ranks.
        strategy: How the ranks of a sequence are used, for example "U4R2", where the configuration does not say.
            Default: Ulysses on all of them.
        steps: Returns the number of denoising steps, for settings that depend on it; a pipeline says it itself.
        host: The name of the caller in reports.

    Returns:
        The session: its plans, strategies and statistics.

    Raises:
        UserError: On all ranks together, for a transformer that is unknown, compiled or parallelized already, another
            attention backend, or a strategy or configuration that does not fit or differs between ranks. The model is
            then as it was.
    """
    transformer = transformer_of(model)
    if any(cls.__name__.startswith("xFuser") for cls in type(transformer).__mro__):
        raise UserError(f"{type(transformer).__name__} is xDiT's and shards by itself; use dbsp_xdit.attach(pipe)")
    sequence = _ranks(group)
    batch = SequenceGroup(0, 1) if batch_group is None else _ranks(batch_group)
    together = sequence if batch_group is None else _ranks(everyone)
    default = Strategy(sequence.size, 1) if strategy is None else Strategy.parse(strategy)
    whole = Host(
        name=host,
        sequence=sequence,
        everyone=together,
        attentions=architecture_of(transformer).attentions_of(transformer),
        choose_strategy=lambda config: config.strategy_or(default),
        shard=lambda session, patches: shard_transformer(
            transformer, session, patches, split_batch(transformer, batch, patches)
        ),
        shares_seeds=True,
    )
    return attach_host(model, config, whole, steps)


def disable(model: Any) -> None:
    """Undoes `enable`: attributes, hooks and classes are as before. Nothing happens where nothing is enabled.

    Args:
        model: The pipeline, or its transformer, compiled since or not.
    """
    state = _state_of(model)
    if state is not None:
        state.patches.detach()


def session_of(model: Any) -> AttentionSession | None:
    """The session of an enabled pipeline or transformer.

    Args:
        model: The pipeline, or its transformer, compiled since or not.

    Returns:
        Its session: plans, strategies and statistics. None where db-SP is not enabled.
    """
    state = _state_of(model)
    return None if state is None else state.session


def write_report(model: Any, folder: str | os.PathLike[str] | None = None) -> None:
    """Writes a report of what ran since db-SP was enabled, or since the last report; rank 0 writes.

    For a transformer without a pipeline: pipelines report each of their calls. Call it on all ranks together.

    Args:
        model: A pipeline or transformer that was enabled with setting `report`.
        folder: Where to write. Default: what that setting says.

    Raises:
        UserError: Where there is nothing to report.
        RuntimeError: Where a rank does not come.
    """
    state = _state_of(model)
    observer = None if state is None else run_observer(state.session)
    if state is None or observer is None:
        raise UserError("nothing was collected for a report; parallelize with config={'report': FOLDER, …}")
    name = model_name(model) if hasattr(model, "transformer") else type(getattr(model, "_orig_mod", model)).__name__
    report = make_report(state.session, name, state.host)
    if is_writer(state.session.group):
        write_report_files(report, state.session, Path(folder or observer.folder))
    observer.restart()


@dataclass(frozen=True)
class Host:
    """How a host runs a transformer.

    name:     in reports
    sequence: the ranks that share a sequence;  everyone: those that make one video together
    attentions: the transformer's self-attention modules, one a layer
    choose_strategy: for a configuration; None for "auto"
    shard:    puts the session into the transformer; returns what is true as its attribute `_is_parallelized`
    shares_seeds: whether a pipeline's calls without a generator get one that all ranks seed alike
    full_latents: makes a rank's latents the whole video's, where each rank denoises a part
    """

    name: str
    sequence: SequenceGroup
    everyone: SequenceGroup
    attentions: Sequence[nn.Module]
    choose_strategy: Callable[[DbspConfig], Strategy | None]
    shard: Callable[[AttentionSession, PatchSet], object]
    shares_seeds: bool = False
    full_latents: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclass(frozen=True)
class _State:
    """What is on a transformer."""

    patches: PatchSet
    session: AttentionSession
    host: str


def attach_host(
    model: Any, config: ConfigLike, host: Host, steps: Callable[[], int | None] | None = None
) -> AttentionSession:
    """Puts db-SP on a pipeline or transformer in one of the hosts. Collective; as `enable` says."""
    transformer = transformer_of(model)
    pipe = None if transformer is model else model
    check_not_parallelized(transformer, host.attentions)
    config = resolve_config(config, transformer, host.everyone, pipe=pipe)
    strategy = host.choose_strategy(config)
    session = observed_session(
        config,
        host.sequence,
        strategy,
        transformer.config.num_attention_heads,
        len(host.attentions),
        steps or (lambda: None if pipe is None else num_inference_steps_of(pipe)),
        generation=lambda: current_generation_id(pipe),
    )
    device = next(transformer.parameters()).device
    log_config(config, identify(transformer, pipe), host.everyone, strategy, device)
    with PatchSet() as patches:
        patches.set_attribute(transformer, "_is_parallelized", host.shard(session, patches))
        if pipe is not None:
            if host.shares_seeds:
                share_seeds(pipe, host.everyone, patches)
            report_calls(pipe, session, patches, host.name, host.full_latents)
        patches.set_attribute(transformer, _STATE, _State(patches, session, host.name))
    return session


def transformer_of(model: Any) -> Any:
    """A pipeline's transformer, or the transformer that is given.

    Raises UserError for a pipeline without a transformer or with two, and for a compiled transformer.
    """
    transformer = getattr(model, "transformer", model)
    if not isinstance(transformer, nn.Module):
        raise UserError(f"db-SP parallelizes pipelines with a transformer, {type(model).__name__} has none")
    if getattr(model, "transformer_2", None) is not None:
        raise UserError("db-SP runs pipelines with one transformer, this one has two")
    check_not_compiled(transformer)
    return transformer


def share_seeds(pipe: Any, group: SequenceGroup, patches: PatchSet) -> None:
    """Gives calls without `generator` one that all ranks of `group` seed alike, with their first rank's draw.

    The noise is what diffusers draws with that generator on the device that the pipeline computes on, which may be
    another than the one that holds its weights: under CPU offload. Collective at once.
    """
    control = group.control()

    def around(call: Callable[..., Any]) -> Callable[..., Any]:
        def with_generator(*args: Any, generator: Any = None, **kwargs: Any) -> Any:
            if generator is None:
                drawn = int(torch.randint(0, 2**62, (1,)))
                seed = control.gather_integers([drawn], _CPU)[0][0]
                device = getattr(pipe, "_execution_device", None) or pipe.device
                generator = torch.Generator(device).manual_seed(seed)
            return call(*args, generator=generator, **kwargs)

        return with_generator

    around_calls(pipe, around, patches)


def _ranks(group: Group) -> SequenceGroup:
    return group if isinstance(group, SequenceGroup) else SequenceGroup.of(group)


def _state_of(model: Any) -> _State | None:
    transformer = getattr(model, "transformer", model)
    return vars(getattr(transformer, "_orig_mod", transformer)).get(_STATE)  # which torch.compile wraps
