"""Attaches db-SP to a pipeline in an xfuser process, and detaches it without a trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dbsp_core.comm.consistency import run_consistently
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config.config import ConfigLike, DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.reports.observer import run_observer
from dbsp_core.runtime.session.session import AttentionSession
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.api import disable, session_of
from dbsp_diffusers.attach import Host, attach_host
from dbsp_diffusers.attached import attached_to, transformers_of
from dbsp_diffusers.models import ARCHITECTURES, architecture_of
from dbsp_diffusers.patching import PatchSet
from dbsp_diffusers.report_hook import report_or_say_why_not, shown_name
from dbsp_diffusers.sharding.sequence_parallel import shard_transformer
from dbsp_diffusers.sharding.step_caches import refuse_step_caches
from dbsp_xdit.cogvideox import attach_strips, gather_latents
from dbsp_xdit.flags import strategy_from
from dbsp_xdit.wan import attach_wan

__all__ = ["attach", "detach", "recorded", "session_of"]

_WANS = ("xFuserWanTransformer3DWrapper", "xFuserWanVACETransformer3DWrapper")
_COGVIDEOX = "xFuserCogVideoXTransformer3DWrapper"
_KNOWN = (*_WANS, _COGVIDEOX)
"""xfuser's transformers that db-SP knows."""


def attach(pipe: Any, config: ConfigLike = None) -> AttentionSession:
    """Makes the self-attention of a pipeline's transformers dual-balanced, on xfuser's sequence-parallel group.

    Call it on all ranks together, once xfuser's groups are initialised, before `torch.compile`.

    Args:
        pipe: A pipeline with xfuser's Wan or CogVideoX transformer, which keep their own sharding, or with diffusers'
            stock one, which db-SP then shards.
        config: A `DbspConfig`, a mapping, the path of a YAML file, or None for the settings shipped for the
            transformer's checkpoint, dense attention where none are shipped.

    Returns:
        The session of the pipeline's first transformer (Wan2.2 has two): its plans, strategies and statistics.

    Raises:
        UserError: On all ranks, before any of them waits for another, for a transformer that db-SP does not know or
            that something else has changed, and for a kind of parallelism or a strategy that does not fit.
    """
    sequence, guidance = _groups()
    _require_parallel_kinds()

    def look() -> dict[int, str | None]:
        return {id(transformer): _kind_of(transformer) for transformer in transformers_of(pipe).values()}

    kinds = run_consistently(sequence.control(), look)

    def attentions_of(transformer: Any) -> list[Any]:
        if kinds[id(transformer)] != _COGVIDEOX:
            return architecture_of(transformer).attentions_of(transformer)
        refuse_step_caches(transformer, transformer.transformer_blocks)
        return [block.attn1 for block in transformer.transformer_blocks]

    def shard(transformer: Any, session: AttentionSession, patches: PatchSet) -> object:
        kind = kinds[id(transformer)]
        if kind == _COGVIDEOX:
            attach_strips(transformer, session, patches)
            return True
        _require_parallel_guidance(pipe, guidance)
        if kind is None:
            return shard_transformer(transformer, session, patches)
        attach_wan(transformer, session, patches)
        return True

    full_latents = gather_latents(sequence) if _COGVIDEOX in kinds.values() else None
    return attach_host(
        pipe,
        config,
        Host(
            "xdit",
            sequence,
            attentions_of,
            _strategy,
            shard,
            full_latents=full_latents,
            decoders=_decoders(sequence, guidance),
            refused_vae=_refused_vae(pipe),
        ),
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
        if cls.__name__ in _KNOWN:
            return cls.__name__
        if cls.__module__.partition(".")[0] == "xfuser":
            break  # a transformer that shards itself in a way that db-SP does not know
        if cls.__name__ in ARCHITECTURES:
            return None
    raise UserError(
        f"db-SP knows {', '.join((*_KNOWN, *ARCHITECTURES))} in xDiT, not {type(transformer).__name__}; load the "
        "transformer with one of these classes, or use --sp-backend usp"
    )


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


def _refused_vae(pipe: Any) -> str | None:
    """Why a pipeline's videos cannot be decoded in parallel, or None."""
    if not any(cls.__name__ == "xFuserPipelineBaseWrapper" for cls in type(pipe).__mro__):
        return None
    return f"vae: {type(pipe).__name__} decodes on its last rank alone; leave it out, or use --use_parallel_vae"


def _require_parallel_guidance(pipe: Any, guidance: SequenceGroup) -> None:
    """Raises UserError for guidance in parallel with a pipeline that does not split the two passes itself."""
    if guidance.size > 1 and not type(pipe).__module__.startswith("xfuser."):
        raise UserError(
            f"use_cfg_parallel: {type(pipe).__name__} does not run the two guidance passes on two groups of ranks; "
            "leave it out and double the Ulysses or ring degree"
        )


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
