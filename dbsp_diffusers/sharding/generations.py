"""Follows the generations of a pipeline: how far each one is, and that all ranks are at the same one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.masks.steps import Progress, first_value
from dbsp_diffusers.models.token_sequence import timestep_of
from dbsp_diffusers.packed.samples import PackedBatch
from dbsp_diffusers.patching import Arguments, PatchSet, around_calls, signature_of
from dbsp_diffusers.sharding.generation_checks import PASS, GenerationChecks
from dbsp_diffusers.sharding.pass_inputs import BEGIN, Constants, Pass, kinds_of, named_tensors, plain_values

LEFT_OUT = {"LTXI2VLongMultiPromptPipeline": 1}
"""Number of its scheduler's steps that a pipeline's loop leaves out at the end, by the pipeline's class."""


class Generations:
    """Follows the calls of a pipeline, or the passes of a transformer that is used without one.

    Within a call of the pipeline, the scheduler's index says which step it is at. Elsewhere, in another pipeline with
    the same transformer or in a loop of the user's own, a generation begins where timesteps rise.

    Args:
        pipe: The pipeline; None for a transformer without one.
        ranks: The ranks that make one video together.
    """

    def __init__(self, pipe: Any, ranks: SequenceGroup) -> None:
        self.checks = GenerationChecks(ranks)
        self._pipe = pipe
        self._call: object = None
        """A new object for each call of the pipeline; None outside of calls."""
        self._ended: Any = None
        """Timesteps of the pipeline's last call."""
        self._second_pass = False
        """True if the arguments of the pipeline's call ask for a second CFG pass."""
        self._seen: object = object()
        """The generation that the last pass was in."""
        self._timestep: float | None = None
        """That of the last pass outside the pipeline's calls."""
        self._generation = 0
        """Number of generations whose first pass has begun."""
        self._passes = 0
        """Number of this generation's passes before the current one."""
        self._compared: set[object] = set()
        """Positions and kinds of inputs that were compared in this generation."""
        self._unfinished = False
        """True if the last pass has begun and not ended: it may have failed on this rank alone."""
        self._constants = Constants()
        self.ends: list[Callable[[], None]] = []
        """Called when a call of the pipeline has ended without an error; what they raise, they raise on all ranks."""

    def attach(
        self,
        patches: PatchSet,
        problem: Callable[[], Exception | None],
        *,
        shares_state: bool,
        watches_latents: bool = False,
    ) -> None:
        """Follows the pipeline's calls.

        Args:
            problem: Returns why a call cannot be made, if so.
            shares_state: True if all ranks take the state of the first rank's random number generators at each call.
            watches_latents: True to raise on all ranks, at the end of a call, if the latents became NaN on any.
        """
        if self._pipe is None or not callable(self._pipe):
            return

        def around(call: Callable[..., Any]) -> Callable[..., Any]:
            def followed(*args: Any, **kwargs: Any) -> Any:
                # 1. All ranks begin the same call.
                arguments = self._bound(args, kwargs)
                device = self._device() if shares_state else None
                self.checks.check_call(arguments.get("generator") is not None, problem(), device)
                outer = self._call, self._second_pass
                self._call, self._second_pass = object(), _asks_for_second_pass(arguments)
                vars(self._pipe).pop("_num_timesteps", None)  # the last call's, until this one knows
                watching = PatchSet()
                if watches_latents and hasattr(self._scheduler, "step"):
                    around_calls(self._scheduler, self._watched, watching, "step")
                # 2. The call.
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

            return followed

        around_calls(self._pipe, around, patches)

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Mapping[str, Any]:
        """Returns the arguments of the pipeline's call by name, with defaults."""
        try:
            bound = inspect.signature(type(self._pipe).__call__).bind_partial(self._pipe, *args, **kwargs)
        except TypeError:  # the call itself will raise it
            return kwargs
        bound.apply_defaults()
        return bound.arguments | bound.arguments.get("kwargs", {})

    def _watched(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a scheduler's step: tells all ranks of NaN in the latents that it returns. Collective."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            stepped = step(*args, **kwargs)
            latents = stepped[0]
            if isinstance(latents, torch.Tensor) and latents.is_floating_point():
                self.checks.drift.note_not_numbers(latents.isnan().any())
                self.checks.drift.gather(latents.device)
            return stepped

        return watched

    def _device(self) -> torch.device:
        """Returns the device that the pipeline computes on."""
        device = getattr(self._pipe, "_execution_device", None) or getattr(self._pipe, "device", None)
        if isinstance(device, torch.device):
            return device
        parts = (part for part in vars(self._pipe).values() if isinstance(part, nn.Module))  # a pipeline of others'
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
        """Returns what the pipeline says of its denoising."""
        return Progress(self._timesteps) if self._call is None else Progress(self._call, self._index)

    def steps(self) -> int | None:
        """Returns the number of steps of the current generation; None before it is known, and without a pipeline.

        With `strength` below 1, a pipeline leaves out the first of its scheduler's. Outside the pipeline's calls its
        scheduler may be another than the one in use: then it has no timesteps, or is through with those that it has.
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
        """True within a call of the pipeline."""
        return self._call is not None

    def has_second_pass(self) -> bool:
        """Returns True if the pipeline says that it runs a second CFG pass in the current step.

        Outside the pipeline's calls, passes in the cache contexts of CFG are expected to come in pairs.
        """
        if self._call is None:
            return True
        guider = getattr(self._pipe, "guider", None)
        if guider is not None:
            return bool(guider._is_cfg_enabled()) if hasattr(guider, "_is_cfg_enabled") else False
        guided = getattr(self._pipe, "do_classifier_free_guidance", None)
        return guided if isinstance(guided, bool) else self._second_pass

    def hook(self, transformer: nn.Module, patches: PatchSet, *, always: bool) -> None:
        """Gives the transformer the first rank's inputs on all ranks, which compare what each was given.

        Ranks meet before each generation's first passes, those with inputs of new shapes, and the one after a pass
        that failed: all raise there what differs. Where gradients flow through the inputs, and in training, they meet
        before every pass, and each computes with its own. In other passes each rank compares what it takes with what
        it had, on the device, and all raise what that shows two passes later.

        Call it before anything that cuts the inputs is hooked.

        Args:
            always: True to meet before every pass.
        """
        if self.checks.group.size == 1:
            return

        @torch.compiler.disable
        def agree(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
            if args and isinstance(args[0], PackedBatch):
                return None  # of samples that each rank brings its own of: all are gathered before the pass
            return self.agree(self.begin_pass(module, args, kwargs, always=always))

        patches.hook(transformer.register_forward_pre_hook, agree, with_kwargs=True)
        patches.hook(transformer.register_forward_hook, self.end_pass)

    @torch.compiler.disable
    def end_pass(self, *_: Any) -> None:
        """Notes that a pass has ended without an error."""
        self._unfinished = False

    def begin_pass(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, always: bool) -> Pass:
        """Begins a pass on this rank. Not collective; every rank calls it, if it computes the pass or not.

        Args:
            module: The transformer, whose call has these arguments.
            always: True if ranks meet before every pass.
        """
        # 1. Its place in the generation.
        inputs = signature_of(module).bind(*args, **kwargs).arguments
        training = module.training and torch.is_grad_enabled()
        first = self._begins(None if training else timestep_of(inputs))
        failed, self._unfinished = self._unfinished, True
        self._generation += first
        self._passes = 0 if first else 1 if failed else self._passes + 1  # ranks may have counted others
        if first:
            self._compared.clear()
        self.checks.drift.begin_pass()
        # 2. What it is given.
        sample, *others = inputs
        latents = named_tensors({sample: inputs[sample]})
        conditions = named_tensors({name: inputs[name] for name in others})
        plain = {name: plain_values(inputs[name]) for name in others if not isinstance(inputs[name], torch.Tensor)}
        # 3. Whether ranks meet before it.
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
        """Returns a pass's arguments with the first rank's inputs. Collective; waits for the device where ranks meet.

        Args:
            checks: Those of the ranks that take part, if not all do.

        Raises:
            UserError: On all ranks that take part, if they meet and anything differs.
        """
        # 1. The first rank's tensors, and how they compare with this rank's.
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
            if checks is self.checks:  # else all ranks hear of it later
                self.checks.drift.gather(begun.device)
        # 2. The arguments with them.
        if begun.keeps_inputs:
            return begun.arguments
        replaced = {
            id(mine): self._constants.substitute(mine, values)
            for mine, values in zip(tensors, first, strict=True)
            if mine is not values
        }
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: replaced.get(id(tensor), tensor), begun.arguments)
        return args, kwargs

    def _begins(self, timestep: torch.Tensor | float | None) -> bool:
        """Returns True if a pass is a generation's first; reads the timestep outside the pipeline's calls alone."""
        last, self._seen = self._seen, self.progress().generation
        if self._call is not None:
            return self._seen is not last
        first = self._seen is not last
        if timestep is not None:
            before, self._timestep = self._timestep, first_value(timestep)
            first = first or (before is not None and self._timestep > before)
        if first:
            self.checks.calls += 1
        return first


def _asks_for_second_pass(arguments: Mapping[str, Any]) -> bool:
    """Returns True if the arguments of a pipeline's call ask for a second CFG pass, by diffusers' rule.

    For pipelines that keep the decision to themselves: those with `true_cfg_scale`, and Ovis-Image's.
    """
    scale = arguments.get("true_cfg_scale", arguments.get("guidance_scale"))
    pooled = arguments.get("negative_pooled_prompt_embeds", True)  # where the call takes them, both are needed
    embedded = arguments.get("negative_prompt_embeds") is not None and pooled is not None
    has_negative = arguments.get("negative_prompt") is not None or embedded
    return isinstance(scale, (int, float)) and scale > 1 and has_negative
