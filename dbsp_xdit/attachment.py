"""Attaching db-SP to a pipeline in an xfuser process, and detaching it without a trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config.config import ConfigLike, DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.reports.observer import run_observer
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.architectures import ARCHITECTURES, architecture_of
from dbsp_diffusers.attach import Host, attach_host, transformers_of
from dbsp_diffusers.caching import refuse_step_caches
from dbsp_diffusers.enabling import disable, session_of
from dbsp_diffusers.patching import PatchSet
from dbsp_diffusers.report_hook import report_or_say_why_not, shown_name
from dbsp_diffusers.sharding.batch_parallel import split_batch
from dbsp_diffusers.sharding.sequence_parallel import shard_transformer
from dbsp_xdit.cogvideox import attach_strips, gather_latents
from dbsp_xdit.flags import strategy_from
from dbsp_xdit.wan import attach_wan

__all__ = ["attach", "detach", "recorded", "session_of"]

_WAN, _COGVIDEOX = "xFuserWanTransformer3DWrapper", "xFuserCogVideoXTransformer3DWrapper"
_BLOCKS = {_WAN: "blocks", _COGVIDEOX: "transformer_blocks"}
"""xfuser's transformers that db-SP knows, and their attribute that lists the blocks."""


def attach(pipe: Any, config: ConfigLike = None) -> AttentionSession:
    """Makes the self-attention of `pipe.transformer` dual-balanced, on xfuser's sequence-parallel group.

    Call it on all ranks together, once xfuser's groups are initialised, before `torch.compile`.

    Args:
        pipe: A pipeline with xfuser's Wan or CogVideoX transformer, which keep their own sharding, or with diffusers'
            stock one, which db-SP then shards.
        config: A `DbspConfig`, a mapping, the path of a YAML file, or None for the settings shipped for the
            transformer's checkpoint, dense attention where none are shipped.

    Returns:
        The session: its plans, strategies and statistics.

    Raises:
        UserError: On all ranks, before any of them waits for another, for a transformer that db-SP does not know or
            that something else has changed, and for a kind of parallelism or a strategy that does not fit.
    """
    transformer, *others = transformers_of(pipe).values()
    if others:
        raise UserError("db-SP in xDiT runs pipelines with one transformer, this one has two")
    kind = _kind_of(transformer)
    if kind is None:
        attentions = architecture_of(transformer).attentions_of(transformer)
    else:
        blocks = getattr(transformer, _BLOCKS[kind])
        refuse_step_caches(transformer, blocks)
        attentions = [block.attn1 for block in blocks]
    sequence, guidance = _groups()
    _require_parallel_kinds()

    def shard(transformer: Any, session: AttentionSession, patches: PatchSet) -> object:
        if kind == _COGVIDEOX:
            attach_strips(transformer, session, patches)
            return True
        if kind is None and guidance.size > 1 and architecture_of(transformer).text is not None:
            batch = split_batch(transformer, guidance, patches, repeat_uneven=True)
            return shard_transformer(transformer, session, patches, batch)
        _require_parallel_guidance(pipe, guidance)
        if kind is None:
            return shard_transformer(transformer, session, patches)
        attach_wan(transformer, session, patches)
        return True

    full_latents = gather_latents(sequence) if kind == _COGVIDEOX else None
    return attach_host(
        pipe,
        config,
        Host("xdit", sequence, sequence, lambda _: attentions, _strategy, shard, full_latents=full_latents),
    )


def detach(pipe: Any) -> None:
    """Undoes `attach`: attributes, hooks and classes are as before. Nothing happens where nothing is attached.

    Args:
        pipe: The pipeline; its transformer may have been compiled since.
    """
    disable(pipe)


def _kind_of(transformer: Any) -> str | None:
    """The name of xfuser's class; None for a transformer of diffusers'. Raises UserError for others."""
    for cls in type(transformer).__mro__:
        if cls.__name__ in _BLOCKS:
            return cls.__name__
        if cls.__module__.partition(".")[0] == "xfuser":
            break  # a transformer that shards itself in a way that db-SP does not know
        if cls.__name__ in ARCHITECTURES:
            return None
    raise UserError(
        f"db-SP knows {', '.join((*_BLOCKS, *ARCHITECTURES))} in xDiT, not {type(transformer).__name__}; load the "
        "transformer with one of these classes, or use --sp-backend usp"
    )


def _strategy(config: DbspConfig) -> Strategy | None:
    """What configuration and xfuser's degrees make; None for "auto". Raises UserError where they don't agree."""
    from xfuser.core.distributed import get_ring_parallel_world_size, get_ulysses_parallel_world_size

    return strategy_from(config, get_ulysses_parallel_world_size(), get_ring_parallel_world_size())


def _require_parallel_kinds() -> None:
    """Raises UserError where xfuser's groups are of kinds that don't go with ours."""
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


def _require_parallel_guidance(pipe: Any, guidance: SequenceGroup) -> None:
    """Raises UserError for guidance in parallel with a pipeline that runs its branches one after the other."""
    if guidance.size > 1 and not type(pipe).__module__.startswith("xfuser."):
        raise UserError(
            f"use_cfg_parallel: {type(pipe).__name__} runs its guidance passes one after the other; leave it out, or "
            "use a pipeline of xfuser's that runs them in parallel"
        )


@contextmanager
def recorded(pipe: Any, model: str) -> Iterator[None]:
    """Reports once the pipeline runs inside succeeded, so that writing is in none of xfuser's own timings. Collective.

    Without a folder for reports, nothing.
    """
    session = session_of(pipe)
    observer = None if session is None else run_observer(session)
    if session is None or observer is None:
        yield
        return
    observer.postponed = True
    try:
        yield
    finally:
        observer.postponed = False
    report_or_say_why_not([session], shown_name(model), "xdit")
