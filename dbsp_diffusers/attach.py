"""Attaches db-SP to a pipeline's transformers for any host: configurations, sessions, sharding and reports."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from torch import nn

from dbsp_core.comm.consistency import check_consistent, run_consistently
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config import ConfigLike, DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.steps import StepClock
from dbsp_core.reports.observer import observed_session
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.attached import STATE, Attached, transformers_in, transformers_of
from dbsp_diffusers.devices import use_model_device
from dbsp_diffusers.models import heads_of
from dbsp_diffusers.models.gates import GATE, gates_in_checkpoint
from dbsp_diffusers.packed.packing import packing_of
from dbsp_diffusers.patching import PatchSet
from dbsp_diffusers.report_hook import report_calls
from dbsp_diffusers.resolve import identify, log_config, resolve_config
from dbsp_diffusers.sharding.coverage import Coverage
from dbsp_diffusers.sharding.generation_agreement import GenerationAgreement
from dbsp_diffusers.sharding.generations import Generations
from dbsp_diffusers.sharding.step_caches import ForwardRanks
from dbsp_diffusers.sharding.tiled_decode import share_decoding

__all__ = ["Host", "attach_host"]

VAE_DIFFERS = "setting vae differs on rank(s) {}; it must be the same on every rank"


@dataclass(frozen=True)
class Host:
    """How a host runs a transformer.

    Attributes:
        name: The host's name in reports.
        sequence: The ranks that share a sequence and make one video together.
        attentions: Returns a transformer's self-attention modules, one a layer.
        choose_strategy: Returns the strategy for a configuration; None for "auto".
        shard: Shards a transformer by a session; returns the value of its attribute `_is_parallelized`.
        vae: Whether videos are decoded in parallel, whatever the configuration says.
        decoders: The ranks that decode a video together, if more than `sequence`.
    """

    name: str
    sequence: SequenceGroup
    attentions: Callable[[Any], Sequence[nn.Module]]
    choose_strategy: Callable[[DbspConfig], Strategy | None]
    shard: Callable[[Any, AttentionSession, PatchSet], ForwardRanks]
    vae: bool = False
    decoders: SequenceGroup | None = None


def attach_host(
    model: Any,
    config: ConfigLike,
    host: Host,
    steps: Callable[[], int | None] | None = None,
    patches: PatchSet | None = None,
) -> AttentionSession:
    """Attaches db-SP to a pipeline or transformer in one of the hosts, like `enable`. Collective.

    `patches` are changes made already, which are undone with the others.
    """
    transformers = run_consistently(host.sequence.control(), lambda: _require_attachable(model, host))
    use_model_device(transformers.values(), host.sequence)
    pipe = None if model in transformers.values() else model
    generations = Generations(pipe, host.sequence)
    clock = StepClock(generations.progress, shared=len(transformers) > 1)
    sessions: list[tuple[nn.Module, AttentionSession]] = []
    gates: dict[nn.Module, nn.Linear] = {}
    for name, transformer in transformers.items():
        own = _own_config(config, name, transformer, host, pipe, several=len(transformers) > 1)
        gates |= gates_in_checkpoint(transformer, own.mask, host.sequence.control(), None if pipe is None else name)
        choose = functools.partial(_choose_strategy, host, own)
        strategy = run_consistently(host.sequence.control(), choose)
        attentions = host.attentions(transformer)
        session = observed_session(
            own,
            host.sequence,
            strategy,
            heads_of(attentions[0]),
            len(attentions),
            steps or generations.steps,
            clock,
            before=sessions[0][1] if sessions else None,
        )
        # of the attention's weights: a model may keep others, such as embeddings, in float32
        like = next((p for p in attentions[0].parameters() if p.is_floating_point()), next(transformer.parameters()))
        log_config(own, identify(transformer, pipe), host.sequence, strategy, like)
        sessions.append((transformer, session))
    debug = any(session.config.debug for _, session in sessions)
    changes = patches or PatchSet()

    def change() -> None:
        together: list[ForwardRanks] = []
        for attention, gate in gates.items():
            changes.add_module(attention, GATE, gate)
        for transformer, session in sessions:
            generations.hook(transformer, changes, always=debug)
            ranks, packing = host.shard(transformer, session, changes), packing_of(transformer)
            if packing is not None:
                packing.attach(transformer, changes)
            changes.set_attribute(transformer, "_is_parallelized", ranks)
            together.append(ranks)
        generations.attach(
            changes,
            functools.partial(_exchanged, pipe, list(transformers.values())),
            shares_state=host.decoders is None,
        )
        for (transformer, _), ranks in zip(sessions, together, strict=True):
            on_host = next(transformer.parameters()).device.type == "cpu"
            patience = host.sequence.timeout if on_host else None
            Coverage(transformer, host.attentions, ranks.sharding.reached, generations.board, patience).attach(changes)
        _share_decoding(model, host, sessions[0][1].config.vae, generations.agreement, changes)
        if pipe is not None:
            report_calls(pipe, [session for _, session in sessions], changes, host.name)
        for transformer, _ in sessions:
            state = Attached(changes, sessions, host.name, generations)
            changes.set_attribute(transformer, STATE, state)
            changes.set_attribute(transformer, "__reduce_ex__", _refuse_copy)  # which copy and pickle ask

    with changes:
        run_consistently(host.sequence.control(), change)
    return sessions[0][1]


def _share_decoding(model: Any, host: Host, shared: bool, agreement: GenerationAgreement, patches: PatchSet) -> None:
    """Lets a host's ranks decode together where that is `shared`. Raises UserError where they cannot."""
    if host.decoders is not None:  # more ranks than those that have compared their settings
        agreement = GenerationAgreement(host.decoders)
        check_consistent(host.decoders.control(), None, {VAE_DIFFERS: int(shared)})
    if not shared:
        return
    share_decoding(model, agreement, patches)


def _exchanged(pipe: Any, transformers: Sequence[nn.Module]) -> UserError | None:
    """The error for a transformer that was put into the pipeline after db-SP was enabled on it, if any."""
    for name, part in transformers_in(pipe).items():
        if getattr(part, "_orig_mod", part) not in transformers:
            return UserError(
                f"another {name} was put into the pipeline after db-SP was enabled on it; call `disable` before and "
                "`enable` after such a change"
            )
    return None


def _choose_strategy(host: Host, config: DbspConfig) -> Strategy | None:
    """That of all ranks. A strategy beside bags is of these. Raises UserError for bags that do not fit the ranks."""
    if config.bags is None:
        return host.choose_strategy(config)
    config.bags.require_ranks(host.sequence.size)
    return host.choose_strategy(replace(config, strategy=None))


def _require_attachable(model: Any, host: Host) -> dict[str, Any]:
    """A model's transformers by name. Raises UserError for what db-SP cannot be attached to."""
    transformers = transformers_of(model)
    for transformer in transformers.values():
        _require_not_parallelized(transformer, host.attentions(transformer))
    return transformers


def _require_not_parallelized(transformer: nn.Module, self_attentions: Sequence[nn.Module]) -> None:
    if getattr(transformer, "_is_parallelized", False):
        raise UserError(
            "this transformer is parallelized already; undo that first (dbsp_diffusers.disable, "
            "dbsp_para.unparallelize, dbsp_xdit.detach), or load it again where para-attn did it, which cannot undo it"
        )
    processors = [getattr(attention, "processor", None) for attention in self_attentions]
    if any(getattr(part, "_parallel_config", None) is not None for part in (transformer, *processors)):
        raise UserError(
            "this transformer is parallelized by diffusers (enable_parallelism); load it without that, and call "
            'dbsp_diffusers.enable(pipe, strategy="UxRy") or enable(pipe, mesh=mesh) instead'
        )


def _refuse_copy(protocol: int) -> NoReturn:
    """Raises UserError: a copy would compute with the original's weights, to which the replaced methods are bound."""
    raise UserError(
        "a transformer on which db-SP is enabled cannot be copied or pickled; do so before `enable`, or after "
        "`disable` and enable it again. Its state_dict and save_pretrained are as always"
    )


def _own_config(
    config: ConfigLike, name: str, transformer: nn.Module, host: Host, pipe: Any, several: bool
) -> DbspConfig:
    """One transformer's settings; each of several records its masks in a folder of its own. Collective."""
    own = resolve_config(config, transformer, host.sequence, pipe=pipe, name=name, vae=host.vae)
    return replace(own, record=os.path.join(own.record, name)) if own.record and several else own
