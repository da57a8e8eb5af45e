"""Attaches db-SP to a pipeline's transformers in any framework: configurations, sessions, sharding and reports."""

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
from dbsp_diffusers.sharding.sequence_parallel import shard_transformer

if TYPE_CHECKING:
    from dbsp_diffusers.sharding.guidance import Halves

_WEIGHTS_DIFFER = (
    "the transformer's weights differ in name, shape, dtype, adapters or branches on rank(s) {}; load the same "
    "checkpoint, LoRA and quantisation on every rank"
)
_VAE_DIFFERS = "setting vae differs on rank(s) {}; it must be the same on every rank"


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
    attaching = _Attaching(model, framework, changes)
    with changes:
        # 1. On this rank alone.
        attached, problem = attempt(lambda: attaching.attach(config, steps))
        device, weights = attached or (NO_DEVICE, 0)
        # 2. Check that all ranks agree.
        sessions = [] if problem else list(attaching.sessions.values())
        devices = check_settings(ranks, sessions, problem, {_WEIGHTS_DIFFER: weights}, device)
        require_own_gpus(ranks, devices)
        if framework.decoders is not None:  # more ranks than those that have compared their settings
            agree(framework.decoders.control(), {_VAE_DIFFERS: int(sessions[0].config.vae)})
        # 3. Reports, if any rank asked for one.
        observe_run(sessions)
        if attaching.pipe is not None:
            report_calls(attaching.pipe, sessions, changes, framework.name)
    if ranks.rank == 0:
        attaching.log()
    return sessions[0]


@dataclass
class _Attaching:
    """One rank's way to attach db-SP to a model, step by step."""

    model: Any  # A pipeline, or a transformer
    framework: Framework
    changes: PatchSet  # All changes to the model
    pipe: Any = None  # The pipeline; None for a transformer without one
    transformers: dict[str, Any] = field(default_factory=dict)  # By their names in the pipeline
    sessions: dict[nn.Module, AttentionSession] = field(default_factory=dict)  # By transformer
    branch_layers: Counter[str] = field(default_factory=Counter)  # By name, how many came from the checkpoint
    generations: Generations = field(init=False)  # Follows the pipeline's calls

    def attach(self, config: ConfigLike, steps: Callable[[], int | None] | None) -> tuple[tuple[int, int], int]:
        """Attaches all on this rank. Returns its device for `require_own_gpus`, and the weights' fingerprint."""
        device = self.find_transformers()
        configs = self.resolve_settings(config)
        self.make_sessions(configs, steps)
        self.shard()
        self.hook()
        return device, fingerprint_of([_weights(transformer) for transformer in self.sessions])

    def find_transformers(self) -> tuple[int, int]:
        """Finds the transformers, and returns their device for `require_own_gpus`. Raises UserError for others."""
        require_torch_attention()
        self.transformers = transformers_of(self.model)
        for transformer in self.transformers.values():
            _require_not_parallelized(transformer)
        if self.model not in self.transformers.values():
            self.pipe = self.model
            if STATE in getattr(self.pipe, "__dict__", {}):
                raise UserError(
                    "db-SP is enabled on this pipeline already, maybe on a transformer that it had before; call "
                    "dbsp_diffusers.disable(pipe) first"
                )
        return use_model_device(self.transformers.values(), self.framework.ranks)

    def resolve_settings(self, config: ConfigLike) -> dict[str, DbspConfig]:
        """Returns the settings by a transformer's name; each of several records in a folder of its own."""
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
        """Makes a session for each transformer, of which all share the count of steps."""
        framework = self.framework
        self.generations = Generations(self.pipe, framework.ranks)
        clock = StepClock(self.generations.progress, shared=len(self.transformers) > 1)
        for name, transformer in self.transformers.items():
            config, attentions = configs[name], architecture_of(transformer).attentions_of(transformer)
            if config.bags is None:
                strategy = framework.choose_strategy(config)
            else:  # the configured strategy is that of bags
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
        """Lets all ranks have the first one's inputs, shards them, and adds layers that a checkpoint brings."""
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
            together = shard_transformer(transformer, session, self.changes)
            self.changes.set_attribute(transformer, "_is_parallelized", together)
            Coverage(transformer, together.reached, session).attach(self.changes)
            if self.framework.halves is not None:
                from dbsp_diffusers.sharding.guidance import GuidedCalls

                GuidedCalls(transformer, self.framework.halves, self.generations, debug).attach(self.changes)

    def hook(self) -> None:
        """Follows the pipeline's calls and decoding, and notes on all parts where to find this again."""
        decoders, halves = self.framework.decoders, self.framework.halves
        self.generations.attach(
            self.changes, self._exchanged, shares_state=decoders is None, watches_latents=halves is not None
        )
        if next(iter(self.sessions.values())).config.vae:
            from dbsp_diffusers.sharding.tiled_decode import share_decoding

            checks = self.generations.checks if decoders is None else GenerationChecks(decoders)
            share_decoding(self.model, checks, self.changes)
        attached = Attached(self.changes, self.sessions, self.framework.name)
        for part in (*self.transformers.values(), *([] if self.pipe is None else [self.pipe])):
            self.changes.set_attribute(part, STATE, attached)
            reject_copies(part, self.changes)

    def log(self) -> None:
        """Logs the settings in effect, and layers of branches that were found."""
        for transformer, session in self.sessions.items():
            log_config(session, transformer, self.pipe, self.framework.ranks)
        if self.framework.halves is not None:
            log.info("each half of the ranks computes one of the CFG passes of a step")
        for layer, count in self.branch_layers.items():
            log.info("the checkpoint has %s for %s layers, which is used", layer, count)

    def _exchanged(self) -> UserError | None:
        """Returns the error for a transformer that was put into the pipeline after db-SP was enabled on it, if any."""
        for name, part in transformers_in(self.pipe).items():
            if getattr(part, "_orig_mod", part) not in self.sessions:
                return UserError(
                    f"another {name} was put into the pipeline after db-SP was enabled on it; call `disable` before "
                    "and `enable` after such a change"
                )
        return None


def _weights(transformer: nn.Module) -> object:
    """Returns name, shape, dtype and type of each of a transformer's parameters, and adapters in use."""
    weights, adapters = [], set()
    for path, part in transformer.named_modules():
        for name, weight in part.named_parameters(path, recurse=False):
            weights.append((name, tuple(weight.shape), weight.dtype, type(weight.data).__name__))
        for kind in ("active_adapters", "merged_adapters"):  # of a layer; the transformer's own are methods
            if isinstance(names := getattr(part, kind, None), (list, tuple)):
                adapters.add((kind, *names))
    return weights, sorted(adapters)


def _require_not_parallelized(transformer: nn.Module) -> None:
    """Raises UserError for a transformer that something shards already."""
    if "xFuser" in [cls.__name__[:6] for cls in type(transformer).__mro__]:
        raise UserError(f"{type(transformer).__name__} is xDiT's and shards by itself; use dbsp_xdit.attach(pipe)")
    attentions = architecture_of(transformer).attentions_of(transformer)
    if getattr(transformer, "_is_parallelized", False):
        raise UserError(
            "this transformer is parallelized already; undo that first (dbsp_diffusers.disable, "
            "dbsp_para.unparallelize, dbsp_xdit.detach), or load it again where para-attn did it, which cannot undo it"
        )
    processors = [getattr(attention, "processor", None) for attention in attentions]
    if any(getattr(part, "_parallel_config", None) is not None for part in (transformer, *processors)):
        raise UserError(
            "this transformer is parallelized by diffusers (enable_parallelism); load it without that, and call "
            'dbsp_diffusers.enable(pipe, strategy="UxRy") or enable(pipe, mesh=mesh) instead'
        )
