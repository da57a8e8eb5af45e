"""Attaches db-SP to a pipeline in an xfuser process, and detaches it without a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from dbsp_core.comm.consistency import run_consistently
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config import ConfigLike, DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.reports.observer import run_observer
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.api import disable, session_of
from dbsp_diffusers.attach import Host, attach_host
from dbsp_diffusers.attached import attached_to
from dbsp_diffusers.models import architecture_of
from dbsp_diffusers.patching import PatchSet
from dbsp_diffusers.report_hook import report_or_say_why_not, shown_name
from dbsp_diffusers.sharding.sequence_parallel import shard_transformer
from dbsp_xdit.flags import strategy_from
from dbsp_xdit.stock import turned_back

__all__ = ["attach", "detach", "recorded", "session_of"]


def attach(pipe: Any, config: ConfigLike = None) -> AttentionSession:
    """Makes the self-attention of a pipeline's transformers dual-balanced, on xfuser's sequence-parallel group.

    Transformers and pipelines of xfuser's own classes are turned back into diffusers' until `detach`, and db-SP shards
    them. Call it on all ranks together, once xfuser's groups are initialised, before `torch.compile`.

    Args:
        pipe: A pipeline of diffusers' or xfuser's, with a transformer whose class in diffusers db-SP knows.
        config: A `DbspConfig`, a mapping, the path of a YAML file, a mask alone, or None for the settings shipped for
            the transformer's checkpoint, dense attention where none are shipped.

    Returns:
        The session of the pipeline's first transformer (Wan2.2 has two): its plans, strategies and statistics.

    Raises:
        UserError: On all ranks, before any of them waits for another, for a transformer that db-SP does not know or
            that something else has changed, and for a kind of parallelism or a strategy that does not fit.
    """
    sequence, guidance = _groups()
    _require_parallel_kinds()
    with PatchSet() as patches:
        stock = run_consistently(sequence.control(), lambda: turned_back(pipe, patches))
        host = Host(
            "xdit",
            sequence,
            attentions=lambda transformer: _attentions_of(stock, transformer, guidance),
            choose_strategy=_strategy,
            shard=shard_transformer,
            decoders=_decoders(sequence, guidance),
        )
        return attach_host(stock, config, host, patches=patches)


def _attentions_of(pipe: Any, transformer: Any, guidance: SequenceGroup) -> Sequence[nn.Module]:
    """Returns a transformer's self-attentions. Raises UserError if it, or guidance in parallel, does not fit."""
    attentions = architecture_of(transformer).attentions_of(transformer)
    if guidance.size > 1 and not type(pipe).__module__.startswith("xfuser."):
        raise UserError(
            f"use_cfg_parallel: {type(pipe).__name__} does not run the two guidance passes on two groups of ranks; "
            "leave it out and double the Ulysses or ring degree"
        )
    return attentions


def detach(pipe: Any) -> None:
    """Undoes `attach`: attributes, hooks and classes are as before. Nothing happens where nothing is attached.

    Args:
        pipe: The pipeline; its transformer may have been compiled since.
    """
    disable(pipe)


def _strategy(config: DbspConfig) -> Strategy | None:
    """Combines configuration and xfuser's degrees; None for "auto". Raises UserError where they contradict."""
    from xfuser.core.distributed import get_ring_parallel_world_size, get_ulysses_parallel_world_size

    return strategy_from(config, get_ulysses_parallel_world_size(), get_ring_parallel_world_size())


def _require_parallel_kinds() -> None:
    """Raises UserError where xfuser's groups are of kinds that don't go with db-SP."""
    from xfuser.core.distributed import get_pipeline_parallel_world_size, get_tensor_model_parallel_world_size

    for kind, degree in (
        ("pipefusion_parallel_degree", get_pipeline_parallel_world_size()),
        ("tensor_parallel_degree", get_tensor_model_parallel_world_size()),
    ):
        if degree > 1:
            raise UserError(f"{kind}={degree} does not go with db-SP; leave it at 1")


def _groups() -> tuple[SequenceGroup, SequenceGroup]:
    """The ranks that share a sequence, and those that share the branches of guidance."""
    from xfuser.core.distributed import get_cfg_group, get_sp_group, model_parallel_is_initialized

    if not model_parallel_is_initialized():
        raise UserError(
            "xfuser's process groups are not initialised; call xfuser.core.distributed.initialize_runtime_state, or "
            "build the pipeline with xfuser, before dbsp_xdit.attach"
        )
    return SequenceGroup.of(get_sp_group().device_group), SequenceGroup.of(get_cfg_group().device_group)


def _decoders(sequence: SequenceGroup, guidance: SequenceGroup) -> SequenceGroup | None:
    """All ranks, where they are two halves of guidance that each have the latents of the one video; else None."""
    from xfuser.core.distributed import get_world_group

    world = SequenceGroup.of(get_world_group().device_group)
    return world if guidance.size > 1 and world.size == sequence.size * guidance.size else None


@contextmanager
def recorded(pipe: Any, model: str) -> Iterator[None]:
    """Reports once the pipeline runs inside have succeeded, after xfuser's own timings have ended. Collective.

    Does nothing without a folder for reports.
    """
    state = attached_to(pipe)
    sessions = [] if state is None else [session for _, session in state.sessions]
    observer = run_observer(sessions[0]) if sessions else None
    if observer is None:
        yield
        return
    observer.postponed = True
    try:
        yield
    finally:
        observer.postponed = False
    report_or_say_why_not(sessions, shown_name(model), "xdit")
