"""Attaches db-SP to a pipeline's transformers for any framework: settings, sessions, sharding and reports."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from dbsp_core.comm.consistency import agree, attempt
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config import ConfigLike, DbspConfig
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.steps import StepClock
from dbsp_core.reports.collect import is_writer, require_report_folder
from dbsp_core.reports.observer import observe_run, observed_session
from dbsp_core.runtime.consistency_checks import check_settings
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.sources import RecordQKSource
from dbsp_core.utils.errors import UserError, fingerprint_of
from dbsp_core.utils.process import log
from dbsp_diffusers.attached import STATE, Attached
from dbsp_diffusers.devices import NO_DEVICE, require_own_gpus, use_model_device
from dbsp_diffusers.models import architecture_of, heads_of
from dbsp_diffusers.models.gates import branch_layer, branch_layers_in_checkpoint
from dbsp_diffusers.models.transformers import transformers_in, transformers_of
from dbsp_diffusers.patching import PatchSet, reject_copies
from dbsp_diffusers.report_hook import report_calls
from dbsp_diffusers.resolve import log_config, resolve_config
from dbsp_diffusers.sharding.attention import require_torch_attention
from dbsp_diffusers.sharding.coverage import Coverage
from dbsp_diffusers.sharding.generation_checks import GenerationChecks
from dbsp_diffusers.sharding.generations import Generations
from dbsp_diffusers.sharding.sequence_parallel import SequenceSharding

if TYPE_CHECKING:
    from dbsp_diffusers.sharding.guidance import Halves

_WEIGHTS_DIFFER = (
    "the transformer's weights differ in name, shape, dtype, adapters or branches on rank(s) {}; load the same "
    "checkpoint, LoRA and quantization on every rank"
)
_VAE_DIFFERS = "setting vae differs on rank(s) {}; it must be the same on every rank"


@dataclass(frozen=True)
class Framework:
    """A framework's way to run a transformer."""

    name: str  # used in reports
    sequence: SequenceGroup  # the ranks that share a sequence
    choose_strategy: Callable[[DbspConfig], Strategy | None]  # by configuration; None for "auto"
    vae: bool = False  # True to decode videos in parallel, for any configuration
    decoders: SequenceGroup | None = None  # the ranks that decode a video together, if more than `sequence`
    halves: Halves | None = None  # if each half of a video's ranks computes one CFG pass; `sequence` is one of them

    @property
    def ranks(self) -> SequenceGroup:
        """The ranks that generate one video together."""
        return self.sequence if self.halves is None else self.halves.ranks


def attach_framework(
    model: Any,
    config: ConfigLike,
    framework: Framework,
    steps: Callable[[], int | None] | None = None,
    patches: PatchSet | None = None,
) -> AttentionSession:
    """Attaches db-SP to a pipeline or transformer, like `enable`. Collective.

    Each rank attaches everything, then ranks compare once: if a rank fails or differs, all undo their changes.
    `patches` are earlier changes to undo together.
    """
    model = getattr(model, "_orig_mod", model)  # compiled modules call the original's hooks
    ranks, changes = framework.ranks, patches or PatchSet()
    attaching = _Attaching(model, framework, changes)
    with changes:
        # 1. Local setup
        attached, problem = attempt(lambda: attaching.attach(config, steps))
        device, weights = attached or (NO_DEVICE, 0)
        # 2. Check that all ranks agree
        sessions = [] if problem else list(attaching.sessions.values())
        devices = check_settings(ranks, sessions, problem, {_WEIGHTS_DIFFER: weights}, device)
        require_own_gpus(ranks, devices)
        if framework.decoders is not None:  # these ranks have not compared settings yet
            agree(framework.decoders.control(), {_VAE_DIFFERS: int(sessions[0].config.vae)})
        # 3. Reports, if any rank asked for one
        observe_run(sessions)
        if attaching.pipe is not None:
            report_calls(attaching.pipe, sessions, changes, framework.name)
    if ranks.rank == 0:
        attaching.log()
    return sessions[0]


@dataclass
class _Attaching:
    """The steps of attaching db-SP to a model on one rank."""

    model: Any  # a pipeline or a transformer
    framework: Framework
    changes: PatchSet  # all changes to the model
    pipe: Any = None  # the pipeline; None for a transformer without one
    transformers: dict[str, Any] = field(default_factory=dict)  # by name in the pipeline
    sessions: dict[nn.Module, AttentionSession] = field(default_factory=dict)  # by transformer
    branch_layers: Counter[str] = field(default_factory=Counter)  # by name, number of layers from the checkpoint
    generations: Generations = field(init=False)  # follows the pipeline's calls

    def attach(self, config: ConfigLike, steps: Callable[[], int | None] | None) -> tuple[tuple[int, int], int]:
        """Runs all steps on this rank. Returns its device for `require_own_gpus`, and the weights' fingerprint."""
        device = self.find_transformers()
        configs = self.resolve_settings(config)
        self.make_sessions(configs, steps)
        self.shard()
        self.hook()
        return device, fingerprint_of([_weights(transformer) for transformer in self.sessions])

    def find_transformers(self) -> tuple[int, int]:
        """Finds the transformers; returns their device for `require_own_gpus`. Raises UserError for others."""
        require_torch_attention()
        self.transformers = transformers_of(self.model)
        for transformer in self.transformers.values():
            _require_not_parallelized(transformer)
        if self.model not in self.transformers.values():
            self.pipe = self.model
            if STATE in vars(self.pipe):
                raise UserError(
                    "db-SP is already enabled on this pipeline, or on a transformer that it had before; call "
                    "dbsp_diffusers.disable(pipe) first"
                )
        return use_model_device(self.transformers.values(), self.framework.ranks)

    def resolve_settings(self, config: ConfigLike) -> dict[str, DbspConfig]:
        """Returns the settings by transformer name, with separate folders for recordings."""
        configs = {}
        for name, transformer in self.transformers.items():
            resolved = resolve_config(config, transformer, self.pipe, name, vae=self.framework.vae)
            if len(self.transformers) > 1 and resolved.record:
                resolved = replace(resolved, record=os.path.join(resolved.record, name))
            if len(self.transformers) > 1 and isinstance(resolved.mask, RecordQKSource):
                resolved = replace(resolved, mask=replace(resolved.mask, path=os.path.join(resolved.mask.path, name)))
            if resolved.report and is_writer(self.framework.ranks):
                require_report_folder(Path(resolved.report).absolute(), "report")
            configs[name] = resolved
        return configs

    def make_sessions(self, configs: dict[str, DbspConfig], steps: Callable[[], int | None] | None) -> None:
        """Makes a session for each transformer, sharing the step clock."""
        framework = self.framework
        self.generations = Generations(self.pipe, framework.ranks)
        clock = StepClock(self.generations.progress, shared=len(self.transformers) > 1)
        for name, transformer in self.transformers.items():
            config, attentions = configs[name], architecture_of(transformer).attentions_of(transformer)
            if config.bags is None:
                strategy = framework.choose_strategy(config)
            else:  # the configured strategy is for bags
                config.bags.require_ranks(framework.sequence.size)
                strategy = framework.choose_strategy(replace(config, strategy=None))
            self.sessions[transformer] = observed_session(
                config=config,
                group=framework.sequence,
                strategy=strategy,
                heads=heads_of(attentions[0]),
                layers=len(attentions),
                steps=steps or self.generations.steps,
                clock=clock,
                check=False,
            )

    def shard(self) -> None:
        """Broadcasts and shards inputs, and adds the checkpoint's branch layers."""
        debug = any(session.config.debug for session in self.sessions.values())
        for name, transformer in self.transformers.items():
            session = self.sessions[transformer]
            mask, layer_name = session.config.mask, branch_layer(session.config.mask) or ""
            layers = branch_layers_in_checkpoint(transformer, mask, None if self.pipe is None else name)
            for attention, layer in layers.items():
                self.changes.add_module(attention, layer_name, layer)
            self.branch_layers += Counter({layer_name: len(layers)})
            if self.framework.halves is None:
                self.generations.hook(transformer, self.changes, always=debug)
            together = SequenceSharding(transformer, session, self.changes).together
            self.changes.set_attribute(transformer, "_is_parallelized", together)
            Coverage(transformer, together.reached, session).attach(self.changes)
            if self.framework.halves is not None:
                from dbsp_diffusers.sharding.guidance import GuidedCalls

                GuidedCalls(transformer, self.framework.halves, self.generations, debug).attach(self.changes)

    def hook(self) -> None:
        """Hooks the pipeline's calls and decoding, and stores the state on all parts."""
        decoders, halves = self.framework.decoders, self.framework.halves
        self.generations.attach(
            self.changes, self._exchanged, shares_state=decoders is None, watches_latents=halves is not None
        )
        if next(iter(self.sessions.values())).config.vae:
            from dbsp_diffusers.sharding.tiled_decode import share_decoding

            checks = self.generations.checks if decoders is None else GenerationChecks(decoders)
            share_decoding(self.model, checks, self.changes)
        attached = Attached(self.changes, self.sessions, self.framework.name)
        for part in (*self.transformers.values(), self.pipe):
            if part is not None:
                self.changes.set_attribute(part, STATE, attached)
                reject_copies(part, self.changes)

    def log(self) -> None:
        """Logs the effective settings, and branch layers from the checkpoint."""
        for transformer, session in self.sessions.items():
            log_config(session, transformer, self.pipe, self.framework.ranks)
        if self.framework.halves is not None:
            log.info("each half of the ranks computes one of the CFG passes of a step")
        for layer, count in self.branch_layers.items():
            log.info("using %s of the checkpoint in %s layers", layer, count)

    def _exchanged(self) -> UserError | None:
        """Returns the error if a transformer was replaced after db-SP was enabled on the pipeline, or None."""
        for name, part in transformers_in(self.pipe).items():
            if getattr(part, "_orig_mod", part) not in self.sessions:
                return UserError(
                    f"the pipeline's {name} was replaced after db-SP was enabled; call `disable` before and "
                    "`enable` after such a change"
                )
        return None


def _weights(transformer: nn.Module) -> object:
    """Returns name, shape, dtype and type of each parameter, and active adapters."""
    weights, adapters = [], set()
    for path, part in transformer.named_modules():
        for name, weight in part.named_parameters(path, recurse=False):
            weights.append((name, tuple(weight.shape), weight.dtype, type(weight.data).__name__))
        for kind in ("active_adapters", "merged_adapters"):  # of layers; the transformer's are methods
            if isinstance(names := getattr(part, kind, None), (list, tuple)):
                adapters.add((kind, *names))
    return weights, sorted(adapters)


def _require_not_parallelized(transformer: nn.Module) -> None:
    """Raises UserError if a transformer is already sharded."""
    if "xFuser" in [cls.__name__[:6] for cls in type(transformer).__mro__]:
        raise UserError(f"{type(transformer).__name__} is xDiT's and shards by itself; use dbsp_xdit.attach(pipe)")
    attentions = architecture_of(transformer).attentions_of(transformer)
    if getattr(transformer, "_is_parallelized", False):
        raise UserError(
            "this transformer is already parallelized; undo that first (dbsp_diffusers.disable, "
            "dbsp_para.unparallelize, dbsp_xdit.detach), or load it again if para-attn did it, which cannot undo it"
        )
    processors = [getattr(attention, "processor", None) for attention in attentions]
    if any(getattr(part, "_parallel_config", None) is not None for part in (transformer, *processors)):
        raise UserError(
            "this transformer is parallelized by diffusers (enable_parallelism); load it without that, and call "
            'dbsp_diffusers.enable(pipe, strategy="UxRy") or enable(pipe, mesh=mesh) instead'
        )
