"""Attaches db-SP to a pipeline's transformers in any framework: configurations, sessions, sharding and reports."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dbsp_core.comm.consistency import check_consistent
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config import ConfigLike, DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.steps import StepClock
from dbsp_core.models.table import model_title
from dbsp_core.reports.collect import is_writer, require_report_folder
from dbsp_core.reports.observer import observe_run, observed_session
from dbsp_core.runtime.consistency_checks import check_settings
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.sources import RecordQKSource
from dbsp_core.utils.errors import UserError, fingerprint_of
from dbsp_core.utils.process import log
from dbsp_diffusers.attached import STATE, Attached, carried_by, weights_fingerprint
from dbsp_diffusers.devices import require_own_gpus, use_model_device
from dbsp_diffusers.models import architecture_of, heads_of
from dbsp_diffusers.models.gates import GATE, GATES_DIFFER, gated_layers, gates_in_checkpoint
from dbsp_diffusers.models.transformers import transformers_in, transformers_of
from dbsp_diffusers.packed.forward import packing_of
from dbsp_diffusers.patching import PatchSet, reject_copies
from dbsp_diffusers.report_hook import report_calls
from dbsp_diffusers.resolve import identify, log_config, resolve_config
from dbsp_diffusers.sharding.attention import require_torch_attention
from dbsp_diffusers.sharding.coverage import Coverage
from dbsp_diffusers.sharding.generation_checks import GenerationChecks
from dbsp_diffusers.sharding.generations import Generations
from dbsp_diffusers.sharding.guidance import GuidedCalls
from dbsp_diffusers.sharding.halves import Halves
from dbsp_diffusers.sharding.sequence_parallel import shard_transformer
from dbsp_diffusers.sharding.step_caches import ForwardRanks
from dbsp_diffusers.sharding.tiled_decode import share_decoding

_DIFFER = (
    "the configuration differs on rank(s) {}; it must be the same on every rank",
    GATES_DIFFER,
    "the transformer's weights differ in name, shape, dtype or adapters on rank(s) {}; load the same checkpoint, LoRA "
    "and quantisation on every rank",
)
VAE_DIFFERS = "setting vae differs on rank(s) {}; it must be the same on every rank"


@dataclass(frozen=True)
class Framework:
    """A framework's way to run a transformer.

    Attributes:
        name: Name of the framework, used in reports.
        sequence: The ranks that share a sequence and make one video together.
        choose_strategy: Returns the strategy for a configuration; None for "auto".
        vae: True if videos are decoded in parallel, for any configuration.
        decoders: The ranks that decode a video together, if more than `sequence`.
        halves: Halves of the ranks that make one video, if each computes one CFG pass; `sequence` is one.
    """

    name: str
    sequence: SequenceGroup
    choose_strategy: Callable[[DbspConfig], Strategy | None]
    vae: bool = False
    decoders: SequenceGroup | None = None
    halves: Halves | None = None

    @property
    def ranks(self) -> SequenceGroup:
        """The ranks that make one video together."""
        return self.sequence if self.halves is None else self.halves.ranks


@dataclass(frozen=True)
class _Attaching:
    """One rank's attachments to a model, before ranks have compared anything of it."""

    pipe: Any
    device: tuple[int, int]  # Result of `use_model_device`
    generations: Generations
    sessions: list[tuple[nn.Module, AttentionSession]]  # Each transformer with its session
    gates: dict[nn.Module, nn.Linear]  # Gates that a checkpoint brings, by attention module
    like: list[torch.Tensor]  # A tensor of each transformer's attentions, of their device and dtype

    def fingerprints(self) -> dict[str, int]:
        """Returns fingerprints of what must be the same on all ranks, by message."""
        configs = [session.config.fingerprint for _, session in self.sessions]
        gated = [gated_layers(transformer, session.config.mask, self.gates) for transformer, session in self.sessions]
        weights = [weights_fingerprint(transformer) for transformer, _ in self.sessions]
        return dict(zip(_DIFFER, map(fingerprint_of, (configs, gated, weights)), strict=True))


def attach_framework(
    model: Any,
    config: ConfigLike,
    framework: Framework,
    steps: Callable[[], int | None] | None = None,
    patches: PatchSet | None = None,
) -> AttentionSession:
    """Attaches db-SP to a pipeline or transformer in one of the frameworks, like `enable`. Collective.

    Each rank attaches all, and then they compare once: if one cannot, or does so otherwise, all undo it.

    `patches` are changes made already, which are undone with the others.
    """
    model = getattr(model, "_orig_mod", model)  # what torch.compile returns calls this module's hooks
    ranks, changes = framework.ranks, patches or PatchSet()
    with changes:
        # 1. Local setup.
        made, problem, fingerprints = None, None, dict.fromkeys(_DIFFER, 0)
        try:
            made = _attached(model, config, framework, steps, changes)
            fingerprints = made.fingerprints()
        except Exception as error:  # any error: this rank must not stop alone
            problem = error
        # 2. Check that all ranks agree.
        sessions = [] if made is None else [session for _, session in made.sessions]
        numbers = made.device if made else (-1, 0)
        numbers_by_rank = check_settings(ranks, sessions, problem, fingerprints, numbers)
        if made is None:
            raise RuntimeError("nothing is attached, and no rank has said why")
        require_own_gpus(ranks, numbers_by_rank)
        if framework.decoders is not None:  # more ranks than those that have compared their settings
            check_consistent(framework.decoders.control(), None, {VAE_DIFFERS: int(sessions[0].config.vae)})
        # 3. Reports, if any rank asked for one.
        observe_run(sessions)
        if made.pipe is not None:
            report_calls(made.pipe, sessions, changes, framework.name)
    _log(made, framework)
    return sessions[0]


def _attached(
    model: Any, config: ConfigLike, framework: Framework, steps: Callable[[], int | None] | None, changes: PatchSet
) -> _Attaching:
    """Attaches db-SP on this rank alone. Raises UserError for what it cannot be attached to."""
    # 1. Settings and sessions.
    require_torch_attention()
    transformers = _require_attachable(model)
    pipe = None if model in transformers.values() else model
    generations = Generations(pipe, framework.ranks)
    clock = StepClock(generations.progress, shared=len(transformers) > 1)
    device = use_model_device(transformers.values(), framework.ranks)
    made = _Attaching(pipe, device, generations, [], {}, [])
    for name, transformer in transformers.items():
        resolved = _own_config(config, name, transformer, framework, pipe, several=len(transformers) > 1)
        if resolved.report and is_writer(framework.ranks):
            require_report_folder(Path(resolved.report).absolute(), "report")
        made.gates.update(gates_in_checkpoint(transformer, resolved.mask, None if pipe is None else name))
        attentions = architecture_of(transformer).attentions_of(transformer)
        parts = (
            resolved,
            framework.sequence,
            _choose_strategy(framework, resolved),
            heads_of(attentions[0]),
            len(attentions),
        )
        session = observed_session(*parts, steps or generations.steps, clock, check=False)
        made.sessions.append((transformer, session))
        # of the attention's weights: a model may keep others, such as embeddings, in float32
        floats = (p for p in attentions[0].parameters() if p.is_floating_point())
        made.like.append(next(floats, next(transformer.parameters())))
    # 2. Hooks.
    for attention, gate in made.gates.items():
        changes.add_module(attention, GATE, gate)
    debug = any(session.config.debug for _, session in made.sessions)
    together: list[ForwardRanks] = []
    for transformer, session in made.sessions:
        if framework.halves is None:
            generations.hook(transformer, session, changes, always=debug)
        ranks, packing = shard_transformer(transformer, session, changes), packing_of(transformer)
        if packing is not None:
            packing.attach(transformer, changes)
        changes.set_attribute(transformer, "_is_parallelized", ranks)
        together.append(ranks)
    exchanged = functools.partial(_exchanged, pipe, list(transformers.values()))
    shares_state, halved = framework.decoders is None, framework.halves is not None
    generations.attach(changes, exchanged, shares_state=shares_state, watches_latents=halved)
    for (transformer, _), ranks in zip(made.sessions, together, strict=True):
        Coverage(transformer, ranks.reached).attach(changes)
        if framework.halves is not None:
            GuidedCalls(transformer, framework.halves, generations, debug).attach(changes)
    # 3. Decoding, and where to find all this again.
    if made.sessions[0][1].config.vae:
        decoders = generations.checks if framework.decoders is None else GenerationChecks(framework.decoders)
        share_decoding(model, decoders, changes)
    attached = Attached(changes, made.sessions, framework.name)
    for part in (*transformers.values(), *([] if pipe is None else [pipe])):
        changes.set_attribute(part, STATE, attached)
        reject_copies(part, changes)
    return made


def _log(made: _Attaching, framework: Framework) -> None:
    """Logs the settings in effect, and gates that were found."""
    for (transformer, session), like in zip(made.sessions, made.like, strict=True):
        identity = identify(transformer, made.pipe)
        title = model_title(identity, type(transformer).__name__ if made.pipe is None else None)
        log_config(session.config, title, identity.sizes[2], framework.ranks, session.strategy, like)
        carried = carried_by(transformer)
        if carried and framework.ranks.rank == 0:
            log.info("the %s carries %s", type(transformer).__name__, ", ".join(carried))
    if framework.halves is not None and framework.ranks.rank == 0:
        log.info("each half of the ranks computes one of the CFG passes of a step")
    if made.gates and framework.ranks.rank == 0:
        log.info("mask source vsa: the checkpoint has gates (%s) of %s layers, which are used", GATE, len(made.gates))


def _exchanged(pipe: Any, transformers: Sequence[nn.Module]) -> UserError | None:
    """Returns the error for a transformer that was put into the pipeline after db-SP was enabled on it, if any."""
    for name, part in transformers_in(pipe).items():
        if getattr(part, "_orig_mod", part) not in transformers:
            return UserError(
                f"another {name} was put into the pipeline after db-SP was enabled on it; call `disable` before and "
                "`enable` after such a change"
            )
    return None


def _choose_strategy(framework: Framework, config: DbspConfig) -> Strategy | None:
    """Chooses all ranks' strategy. With bags it is theirs. Raises UserError for bags that do not fit the ranks."""
    if config.bags is None:
        return framework.choose_strategy(config)
    config.bags.require_ranks(framework.sequence.size)
    return framework.choose_strategy(replace(config, strategy=None))


def _require_attachable(model: Any) -> dict[str, Any]:
    """Returns a model's transformers by name. Raises UserError for what db-SP cannot be attached to."""
    transformers = transformers_of(model)
    for transformer in transformers.values():
        if any(cls.__name__.startswith("xFuser") for cls in type(transformer).__mro__):
            raise UserError(f"{type(transformer).__name__} is xDiT's and shards by itself; use dbsp_xdit.attach(pipe)")
        _require_not_parallelized(transformer, architecture_of(transformer).attentions_of(transformer))
    if STATE in getattr(model, "__dict__", {}) and model not in transformers.values():
        raise UserError(
            "db-SP is enabled on this pipeline already, maybe on a transformer that it had before; call "
            "dbsp_diffusers.disable(pipe) first"
        )
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


def _own_config(
    config: ConfigLike, name: str, transformer: nn.Module, framework: Framework, pipe: Any, several: bool
) -> DbspConfig:
    """Resolves one transformer's settings; each of several records in a folder of its own."""
    resolved = resolve_config(config, transformer, pipe, name, vae=framework.vae)
    if several and resolved.record:
        resolved = replace(resolved, record=os.path.join(resolved.record, name))
    if several and isinstance(resolved.mask, RecordQKSource):
        resolved = replace(resolved, mask=replace(resolved.mask, path=os.path.join(resolved.mask.path, name)))
    return resolved
