"""Follows the generations of a pipeline: how far each one is, and that all ranks are at the same one."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.masks.steps import Progress, first_value
from dbsp_core.runtime.session import AttentionSession
from dbsp_diffusers.models.token_sequence import timestep_of
from dbsp_diffusers.packed_samples import PackedBatch
from dbsp_diffusers.patching import Arguments, PatchSet, around_calls, sample_of, signature_of
from dbsp_diffusers.sharding.generation_checks import GenerationChecks, Meeting
from dbsp_diffusers.sharding.pass_inputs import Constants, named_tensors, plain_values, with_tensors

LEFT_OUT = {"LTXI2VLongMultiPromptPipeline": 1}
"""Number of its scheduler's steps that a pipeline's loop leaves out at the end, by the pipeline's class."""
_COMPARED = 2
"""Passes at the beginning of a generation that are compared: guidance may take one with and one without the prompt."""


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
        self._begun = self._timesteps if _is_called(pipe) else None
        """Timesteps of the pipeline's call that db-SP was enabled in, if any."""
        self._seen: object = object()
        """The generation that the last pass was in."""
        self._timestep: float | None = None
        """That of the last pass outside the pipeline's calls."""
        self._passes = 0
        """Number of this generation's passes before the current one."""
        self._compared: set[object] = set()
        """Positions and kinds of inputs that were compared in this generation."""
        self._unfinished = False
        """True if the last pass has begun and not ended: it may have failed on this rank alone."""
        self._constants = Constants()

    def attach(self, patches: PatchSet, problem: Callable[[], Exception | None], *, shares_state: bool) -> None:
        """Follows the pipeline's calls.

        Args:
            problem: Returns why a call cannot be made, if so.
            shares_state: True if all ranks take the state of the first rank's random number generators at each call.
        """
        if self._pipe is not None and callable(self._pipe):
            around_calls(self._pipe, lambda call: self._around(call, problem, shares_state), patches)

    def _around(
        self, call: Callable[..., Any], problem: Callable[[], Exception | None], shares_state: bool
    ) -> Callable[..., Any]:
        def followed(*args: Any, **kwargs: Any) -> Any:
            device = self._device() if shares_state else None
            self.checks.check_call(self._is_given_generator(args, kwargs), problem(), device)
            outer, self._call = self._call, object()
            vars(self._pipe).pop("_num_timesteps", None)  # the last call's, until this one knows
            try:
                return call(*args, **kwargs)
            finally:
                self._call = outer

        return followed

    def _device(self) -> torch.device:
        """Returns the device that the pipeline computes on."""
        device = getattr(self._pipe, "_execution_device", None) or getattr(self._pipe, "device", None)
        if isinstance(device, torch.device):
            return device
        parts = (part for part in vars(self._pipe).values() if isinstance(part, nn.Module))  # a pipeline of others'
        return next((one.device for part in parts for one in part.parameters()), torch.device("cpu"))

    def _is_given_generator(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Returns True if the pipeline's call is given a generator, by name or by position."""
        if kwargs.get("generator") is not None:
            return True
        try:
            given = inspect.signature(type(self._pipe).__call__).bind_partial(self._pipe, *args, **kwargs)
        except TypeError:  # the call itself will raise it
            return False
        return given.arguments.get("generator") is not None

    @property
    def _scheduler(self) -> Any:
        return getattr(self._pipe, "scheduler", None)

    @property
    def _timesteps(self) -> Any:
        return getattr(self._scheduler, "timesteps", None)

    def progress(self) -> Progress:
        """Returns what the pipeline says of its denoising."""
        index = getattr(self._scheduler, "step_index", None)
        index = index if isinstance(index, int) else None
        if self._call is not None:
            return Progress(self._call, index)
        timesteps = self._timesteps
        if self._begun is None or timesteps is not self._begun or index is None or index >= len(timesteps):
            return Progress(timesteps)
        return Progress(timesteps, index, getattr(self._scheduler, "begin_index", None) or 0)

    def steps(self) -> int | None:
        """Returns the number of steps of the current generation; None before it is known, and without a pipeline.

        With `strength` below 1, a pipeline leaves out the first of its scheduler's.
        """
        left_out = LEFT_OUT.get(type(self._pipe).__name__, 0)
        own = None if self._call is None else vars(self._pipe).get("_num_timesteps")
        if isinstance(own, int):
            return own - left_out
        timesteps = self._timesteps
        begin = getattr(self._scheduler, "begin_index", None) or 0
        return None if timesteps is None else len(timesteps) - begin - left_out

    def hook(self, transformer: nn.Module, session: AttentionSession, patches: PatchSet, *, always: bool) -> None:
        """Gives the transformer the first rank's inputs on all ranks, which compare what each was given.

        Ranks compare at the first attention of a pass: of each generation's first passes, of those with inputs of new
        shapes, and of the one after a pass that failed. Where gradients flow through the inputs, and in training, they
        compare at every pass, and each computes with its own.

        Call it before anything that cuts the inputs is hooked.

        Args:
            session: The transformer's.
            always: True to compare at every pass.
        """
        if self.checks.group.size == 1:
            return

        @torch.compiler.disable
        def agree(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
            if args and isinstance(args[0], PackedBatch):
                return None  # of samples that each rank brings its own of: all are gathered before the pass
            arguments, meeting = self.check_inputs(module, args, kwargs, always=always)
            session.meeting = meeting or session.meeting
            return arguments

        patches.hook(transformer.register_forward_pre_hook, agree, with_kwargs=True)
        patches.hook(transformer.register_forward_hook, self.end_pass)

    @torch.compiler.disable
    def end_pass(self, *_: Any) -> None:
        """Notes that a pass has ended without an error."""
        self._unfinished = False

    def check_inputs(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, always: bool
    ) -> tuple[Arguments, Meeting | None]:
        """Begins a pass: returns its arguments with the first rank's inputs, and what is to be compared. Collective.

        See `hook`, which does so before each forward pass.
        """
        inputs = signature_of(module).bind(*args, **kwargs).arguments
        training = module.training and torch.is_grad_enabled()
        first = self._begins(None if training else timestep_of(inputs))
        self._passes = 0 if first else self._passes + 1
        if first:
            self._compared.clear()
        tensors = {name: one for key, value in inputs.items() for name, one in named_tensors(key, value)}
        own = training or (torch.is_grad_enabled() and any(one.requires_grad for one in tensors.values()))
        kinds = tuple((name, one.shape, one.dtype) for name, one in tensors.items())
        position, meeting = (min(self._passes, _COMPARED - 1), kinds), None
        failed, self._unfinished = self._unfinished, True
        if always or own or failed or position not in self._compared:
            values, meeting = self._compare(inputs)
            self._compared.add(position)
        else:
            values = self.checks.first_rank_values([*tensors.values()])
        if own:
            return (args, kwargs), meeting
        replaced = {
            id(one): self._constants.substitute(one, value)
            for one, value in zip(tensors.values(), values, strict=True)
            if value is not one
        }
        return (with_tensors(args, replaced), with_tensors(kwargs, replaced)), meeting

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
            self.checks.begin_call()
        return first

    def _compare(self, inputs: Mapping[str, Any]) -> tuple[list[torch.Tensor], Meeting]:
        """Returns the first rank's tensors of a pass, and what ranks have to compare of their own. Collective."""
        guidance = None if self._call is None else getattr(self._pipe, "_guidance_scale", None)
        steps = self.steps(), self._passes, guidance
        sample = next(iter(inputs))
        latents = dict(named_tensors(sample, sample_of(inputs)))
        others = {name: value for name, value in inputs.items() if name not in (sample, "return_dict")}
        conditions = dict(named for name, value in others.items() for named in named_tensors(name, value))
        plain = {name: plain_values(value) for name, value in others.items() if not isinstance(value, torch.Tensor)}
        return self.checks.compare(steps, plain, latents, conditions)


def _is_called(pipe: Any) -> bool:
    """Returns True if a pipeline's `__call__` is running in this thread."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and pipe is not None:
        if frame.f_code.co_name == "__call__" and frame.f_locals.get("self") is pipe:
            return True
        frame = frame.f_back
    return False
