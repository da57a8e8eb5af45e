"""Follows the generations of a pipeline, and checks that all ranks are at the same one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.masks.steps import Progress, first_value
from dbsp_diffusers.models.token_sequence import Readings, timestep_of
from dbsp_diffusers.packed.samples import PackedBatch
from dbsp_diffusers.patching import Arguments, PatchSet, around_calls, signature_of
from dbsp_diffusers.sharding.generation_checks import PASS, GenerationChecks
from dbsp_diffusers.sharding.pass_inputs import BEGIN, Pass, kinds_of, named_tensors, plain_values, substitute

LEFT_OUT = {"LTXI2VLongMultiPromptPipeline": 1}
"""Number of the scheduler's last steps that a pipeline's loop skips, by pipeline class."""


class Generations:
    """Follows the calls of a pipeline, or the passes of a transformer without one.

    Within a pipeline call, the scheduler's index gives the step. Elsewhere (another pipeline with the same
    transformer, or the user's own loop) a generation begins where timesteps rise. `ranks` generate one video together.
    """

    def __init__(self, pipe: Any, ranks: SequenceGroup) -> None:
        self.checks = GenerationChecks(ranks)
        self._pipe = pipe
        self._call: object = None  # a new object per pipeline call; None outside of calls
        self._ended: Any = None  # timesteps of the pipeline's last call
        self._second_pass = False  # True if the pipeline call's arguments request a second CFG pass
        self._seen: object = object()  # generation of the last pass
        self._timestep: float | None = None  # of the last pass outside pipeline calls
        self._generation = 0  # number of generations begun
        self._passes = 0  # number of earlier passes of this generation
        self._compared: set[object] = set()  # positions and kinds of inputs compared in this generation
        self._unfinished = False  # True if the last pass has not ended: it may have failed on this rank only
        self._substitutes = Readings()  # of the pipeline's tensors; see `substitute`
        self.ends: list[Callable[[], None]] = []  # called after a successful pipeline call; raise on all ranks alike

    def attach(
        self, patches: PatchSet, problem: Callable[[], Exception | None], *, shares_state: bool, watches_latents: bool
    ) -> None:
        """Wraps the pipeline's calls.

        `problem` returns an error if a call is not possible. With `shares_state`, all ranks begin each call with the
        first rank's random number generator states. With `watches_latents`, they raise at its end if latents became
        NaN on any rank.
        """
        if self._pipe is None or not callable(self._pipe):
            return

        def followed(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            # 1. Begin the same call on all ranks
            arguments = self._bound(args, kwargs)
            device = self._device() if shares_state else None
            self.checks.check_call(arguments.get("generator") is not None, problem(), device)
            outer = self._call, self._second_pass
            self._call, self._second_pass = object(), _asks_for_second_pass(arguments)
            vars(self._pipe).pop("_num_timesteps", None)  # stale value of the last call
            watching = PatchSet()
            if watches_latents and hasattr(self._scheduler, "step"):
                around_calls(self._scheduler, self._watched_step, watching, "step")
            # 2. Run the call
            try:
                result = call(*args, **kwargs)
                for end in self.ends:
                    end()
                self.checks.drift.settle()
                return result
            finally:
                watching.detach()
                self._ended = self._timesteps
                self._call, self._second_pass = outer

        around_calls(self._pipe, followed, patches)

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any]:
        """Returns the pipeline call's arguments by name, with defaults."""
        try:
            bound = inspect.signature(type(self._pipe).__call__).bind_partial(self._pipe, *args, **kwargs)
        except TypeError:  # the call itself will raise it
            return kwargs
        bound.apply_defaults()
        return bound.arguments | bound.arguments.get("kwargs", {})

    def _watched_step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a scheduler's step, and detects NaN in latents on any rank. Collective."""
        stepped = step(*args, **kwargs)
        latents = stepped[0]
        if isinstance(latents, torch.Tensor) and latents.is_floating_point():
            self.checks.drift.note_not_numbers(latents.isnan().any())
            self.checks.drift.gather(latents.device)
        return stepped

    def _device(self) -> torch.device:
        device = getattr(self._pipe, "_execution_device", None) or getattr(self._pipe, "device", None)
        if isinstance(device, torch.device):
            return device
        parts = (part for part in vars(self._pipe).values() if isinstance(part, nn.Module))  # a custom pipeline
        return next((parameter.device for part in parts for parameter in part.parameters()), torch.device("cpu"))

    @property
    def _scheduler(self) -> Any:
        return getattr(self._pipe, "scheduler", None)

    @property
    def _timesteps(self) -> Any:
        return getattr(self._scheduler, "timesteps", None)

    @property
    def _index(self) -> int | None:
        index = getattr(self._scheduler, "step_index", None)
        return index if isinstance(index, int) else None

    def progress(self) -> Progress:
        """Returns the pipeline's denoising progress."""
        return Progress(self._timesteps) if self._call is None else Progress(self._call, self._index)

    def steps(self) -> int | None:
        """Returns the number of steps of the current generation, or None if unknown or without a pipeline.

        With `strength` below 1, a pipeline skips the scheduler's first steps. Outside pipeline calls, another
        scheduler may be in use; the pipeline's then has no timesteps, or has finished them.
        """
        left_out = LEFT_OUT.get(type(self._pipe).__name__, 0)
        counted = None if self._call is None else vars(self._pipe).get("_num_timesteps")
        if isinstance(counted, int):
            return counted - left_out
        timesteps, index, begin = self._timesteps, self._index, getattr(self._scheduler, "begin_index", None) or 0
        if timesteps is None:
            return None
        is_set = getattr(self._scheduler, "num_inference_steps", True) is not None
        is_through = index is not None and index >= len(timesteps)
        if self._call is None and (timesteps is self._ended or is_through or not is_set):
            return None
        return len(timesteps) - begin - left_out

    @property
    def is_called(self) -> bool:
        return self._call is not None

    def has_second_pass(self) -> bool:
        """Returns True if the pipeline runs a second CFG pass in the current step.

        Outside pipeline calls, passes in CFG's cache contexts are expected in pairs.
        """
        if self._call is None:
            return True
        guider = getattr(self._pipe, "guider", None)
        if guider is not None:
            return bool(guider._is_cfg_enabled()) if hasattr(guider, "_is_cfg_enabled") else False
        guided = getattr(self._pipe, "do_classifier_free_guidance", None)
        return guided if isinstance(guided, bool) else self._second_pass

    def hook(self, transformer: nn.Module, patches: PatchSet, *, always: bool) -> None:
        """Hooks the transformer to use the first rank's inputs on all ranks, and to compare inputs.

        Ranks meet before each generation's first passes, passes with new input shapes, and the pass after a failed
        one, and raise differences there. In training, or if gradients flow through the inputs, they meet before every
        pass, and each keeps its own inputs. In other passes, inputs are compared on the device, and differences are
        raised two passes later.

        Call it before hooking anything that shards inputs. With `always`, they meet before every pass.
        """
        if self.checks.group.size == 1:
            return

        @torch.compiler.disable
        def agree(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
            if args and isinstance(args[0], PackedBatch):
                return None  # samples differ by rank and are gathered before the pass
            return self.agree(self.begin_pass(module, args, kwargs, always=always))

        patches.hook(transformer.register_forward_pre_hook, agree, with_kwargs=True)
        patches.hook(transformer.register_forward_hook, self.end_pass)

    @torch.compiler.disable
    def end_pass(self, *_: Any) -> None:
        self._unfinished = False

    def begin_pass(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, always: bool) -> Pass:
        """Begins a pass on this rank, whether or not it computes the pass; see `hook`. Not collective."""
        # 1. Position in the generation
        inputs = signature_of(module).bind(*args, **kwargs).arguments
        training = module.training and torch.is_grad_enabled()
        first = self._begins(None if training else timestep_of(inputs))
        failed, self._unfinished = self._unfinished, True
        self._generation += first
        self._passes = 0 if first else 1 if failed else self._passes + 1  # 1: counts may differ after a failure
        if first:
            self._compared.clear()
        self.checks.drift.begin_pass()
        # 2. Inputs
        sample, *others = inputs
        latents = named_tensors({sample: inputs[sample]})
        conditions = named_tensors({name: inputs[name] for name in others})
        plain = {name: plain_values(inputs[name]) for name in others if not isinstance(inputs[name], torch.Tensor)}
        # 3. Whether ranks meet before it
        tensors = latents | conditions
        keeps = training or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors.values()))
        position = min(self._passes, BEGIN - 1), kinds_of(tensors)
        is_new = always or failed or position not in self._compared
        self._compared.add(position)
        return Pass(
            arguments=(args, kwargs),
            sample=inputs[sample],
            latents=latents,
            conditions=conditions,
            plain=plain,
            generation=self._generation,
            number=self._passes,
            step_index=self.progress().step_index,
            is_new=is_new,
            keeps_inputs=keeps,
        )

    def agree(self, begun: Pass, checks: GenerationChecks | None = None) -> Arguments:
        """Returns a pass's arguments with the first rank's inputs. Collective among the ranks of `checks`, or all.

        If ranks meet, waits for the device, and raises UserError on these ranks if anything differs.
        """
        # 1. Take the first rank's tensors, and compare them with this rank's
        checks = checks or self.checks
        if checks.group.size == 1:
            return begun.arguments
        tensors = begun.tensors
        if begun.compared:
            guidance = None if self._call is None else getattr(self._pipe, "_guidance_scale", None)
            first = checks.meet(PASS, begun.fingerprints(self.steps(), guidance), tensors, begun.messages)
        else:
            first = checks.first_rank_values(tensors)
            self.checks.drift.compare(begun.messages, tensors, first)
            if checks is self.checks:  # otherwise gathered later
                self.checks.drift.gather(begun.device)
        # 2. Insert them into the arguments
        if begun.keeps_inputs:
            return begun.arguments
        replaced = {
            id(mine): substitute(self._substitutes, mine, values)
            for mine, values in zip(tensors, first, strict=True)
            if mine is not values
        }
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: replaced.get(id(tensor), tensor), begun.arguments)
        return args, kwargs

    def _begins(self, timestep: torch.Tensor | float | None) -> bool:
        """Returns True if a pass is a generation's first; reads the timestep only outside pipeline calls."""
        last, self._seen = self._seen, self.progress().generation
        first = self._seen is not last
        if self._call is not None:
            return first
        if timestep is not None:
            before, self._timestep = self._timestep, first_value(timestep)
            first = first or (before is not None and self._timestep > before)
        if first:
            self.checks.calls += 1
        return first


def _asks_for_second_pass(arguments: Mapping[str, Any]) -> bool:
    """Returns True if a pipeline call's arguments request a second CFG pass, by diffusers' rule.

    For pipelines that do not expose the decision: those with `true_cfg_scale`, and Ovis-Image's.
    """
    scale = arguments.get("true_cfg_scale", arguments.get("guidance_scale"))
    pooled = arguments.get("negative_pooled_prompt_embeds", True)  # required if the call has this argument
    embedded = arguments.get("negative_prompt_embeds") is not None and pooled is not None
    has_negative = arguments.get("negative_prompt") is not None or embedded
    return isinstance(scale, (int, float)) and scale > 1 and has_negative
