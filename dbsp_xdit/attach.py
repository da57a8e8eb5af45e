"""Attaching db-SP to a pipeline in an xfuser process, and detaching it without a trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config.config import ConfigLike, DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.reports.observed import observed_session
from dbsp_core.reports.observer import run_observer
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.architectures import ARCHITECTURES, architecture_of
from dbsp_diffusers.attached import get_session, keep, release
from dbsp_diffusers.batch_parallel import split_batch
from dbsp_diffusers.caching import refuse_step_caches
from dbsp_diffusers.checks import check_not_compiled, check_not_parallelized
from dbsp_diffusers.effective_config import identify, log_config, resolve_config
from dbsp_diffusers.patching import PatchSet, current_generation_id, num_inference_steps_of
from dbsp_diffusers.report_hook import report_calls, report_or_say_why_not, shown_name
from dbsp_diffusers.sequence_parallel import shard_transformer
from dbsp_xdit.cogvideox import attach_strips, whole_latents
from dbsp_xdit.flags import strategy_from
from dbsp_xdit.wan import attach_wan, branch_of_wan

__all__ = ["attach", "detach", "recorded", "session_of"]

_WRAPPERS = {"xFuserWanTransformer3DWrapper": "blocks", "xFuserCogVideoXTransformer3DWrapper": "transformer_blocks"}
"""xfuser's transformers that db-SP knows, and their attribute that lists the blocks."""


def attach(pipe: Any, config: ConfigLike = None) -> AttentionSession:
    """Makes the self-attention of `pipe.transformer` dual-balanced, on xfuser's sequence-parallel group.

    pipe:   with xfuser's Wan or CogVideoX transformer, which keep their own sharding, or with diffusers' stock one,
            which is then sharded by db-SP; after xfuser's groups were initialised, before torch.compile
    config: a DbspConfig, a mapping, a YAML file, or None for the settings shipped for the transformer's checkpoint,
            dense where none are shipped
    Raises ValueError, on all ranks and before any of them waits for another, for a transformer that db-SP does not
    know or somebody else has changed, for a kind of parallelism or a strategy that does not fit.
    """
    transformer = pipe.transformer
    if get_session(transformer) is not None:
        raise UserError("db-SP is attached to this transformer already; call dbsp_xdit.detach(pipe) first")
    kind = _kind_of(pipe)
    check_not_compiled(transformer)
    blocks = _blocks_of(transformer, kind)
    check_not_parallelized(transformer, [block.attn1 for block in blocks])
    if kind in _WRAPPERS:
        refuse_step_caches(transformer, blocks)
    sequence, guidance = _groups()
    _require_parallel_kinds()
    config = resolve_config(config, transformer, sequence, pipe=pipe)
    strategy = _strategy(config)
    session = observed_session(
        config,
        sequence,
        strategy,
        transformer.config.num_attention_heads,
        len(blocks),
        steps=lambda: num_inference_steps_of(pipe),
        generation=lambda: current_generation_id(pipe),
    )
    log_config(config, identify(transformer, pipe), sequence, strategy, next(transformer.parameters()).device)
    with PatchSet() as attachment:
        _hook_up(pipe, kind, session, guidance, attachment)
        strips = kind == "xFuserCogVideoXTransformer3DWrapper"
        report_calls(pipe, session, attachment, "xdit", whole=whole_latents(sequence) if strips else None)
        attachment.set_attribute(transformer, "_is_parallelized", True)
        keep(transformer, attachment, session)
    return session


def detach(pipe: Any) -> None:
    """Undoes `attach`: attributes, hooks and classes are as before. Nothing happens where nothing is attached."""
    release(pipe.transformer)


def session_of(pipe: Any) -> AttentionSession | None:
    """The session attached to a pipeline's transformer, if any."""
    return get_session(pipe.transformer)


def _hook_up(pipe: Any, kind: str, session: AttentionSession, guidance: SequenceGroup, attachment: PatchSet) -> None:
    transformer = pipe.transformer
    if kind == "xFuserCogVideoXTransformer3DWrapper":
        attach_strips(transformer, session, attachment)
        return
    if guidance.size > 1 and kind == "stock" and architecture_of(transformer).joint_text:
        batch = split_batch(transformer, guidance, attachment, repeat_uneven=True)
        shard_transformer(transformer, session, attachment, batch)
        return
    _require_branches_apart(pipe, guidance)
    if kind == "stock":
        shard_transformer(transformer, session, attachment)
    else:
        attach_wan(transformer, session, branch_of_wan(pipe, guidance), attachment)


def _kind_of(pipe: Any) -> str:
    """The transformer's class, by name; "stock" for one of diffusers'. Raises ValueError for others."""
    if getattr(pipe, "transformer_2", None) is not None:
        raise UserError("db-SP runs pipelines with one transformer, this one has two; use --sp-backend usp")
    transformer = getattr(pipe.transformer, "_orig_mod", pipe.transformer)
    for cls in type(transformer).__mro__:
        if cls.__name__ in _WRAPPERS:
            return cls.__name__
        if cls.__module__.partition(".")[0] == "xfuser":
            break  # a transformer that shards itself in a way that db-SP does not know
        if cls.__name__ in ARCHITECTURES:
            return "stock"
    raise UserError(
        f"db-SP knows {', '.join((*_WRAPPERS, *ARCHITECTURES))} in xDiT, not {type(transformer).__name__}; load the "
        "transformer with one of these classes, or use --sp-backend usp"
    )


def _blocks_of(transformer: Any, kind: str) -> Any:
    if kind in _WRAPPERS:
        return getattr(transformer, _WRAPPERS[kind])
    return architecture_of(transformer).blocks_of(transformer)


def _strategy(config: DbspConfig) -> Strategy | None:
    """What configuration and xfuser's degrees make; None for "auto". Raises ValueError where they don't agree."""
    from xfuser.core.distributed import get_ring_parallel_world_size, get_ulysses_parallel_world_size

    return strategy_from(config, get_ulysses_parallel_world_size(), get_ring_parallel_world_size())


def _require_parallel_kinds() -> None:
    """Raises ValueError where xfuser's groups are of kinds that don't go with ours."""
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


def _require_branches_apart(pipe: Any, guidance: SequenceGroup) -> None:
    """Raises ValueError for guidance in parallel with a pipeline that runs its branches one after the other."""
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
    report_or_say_why_not(session, shown_name(model), "xdit")
