"""Follows the generations of a pipeline: how far each one is, and that all ranks are at the same one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from dbsp_core.comm.generation import GenerationAgreement, PassInputs
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.masks.schedule import Progress
from dbsp_diffusers.packed_samples import PackedBatch
from dbsp_diffusers.patching import PatchSet, around_calls, sample_of, signature_of

__all__ = ["LEFT_OUT", "Generations", "shared_generator"]

LEFT_OUT = {"LTXI2VLongMultiPromptPipeline": 1}
"""Number of its scheduler's steps that a pipeline's loop leaves out at the end, by the pipeline's class."""


class Generations:
    """Follows the calls of a pipeline, or the passes of a transformer that is used without one.

    Within a call of the pipeline, the scheduler's index says which step it is at. Elsewhere, in another pipeline with
    the same transformer or in a loop of the user's own, a generation begins where timesteps rise.

    Args:
        pipe: The pipeline; None for a transformer without one.
        everyone: The ranks that make one video together.
    """

    def __init__(self, pipe: Any, everyone: SequenceGroup) -> None:
        self.agreement = GenerationAgreement(everyone)
        self._pipe = pipe
        self._call: object = None
        """A new object for each call of the pipeline; None outside of calls."""
        self._seen: object = object()
        """The generation that the last pass was in."""
        self._timestep: float | None = None
        """Timestep of the last pass outside of calls."""
        self._passes = 0
        """Number of this generation's passes before the current one."""

    def attach(self, patches: PatchSet, *, shares_seeds: bool) -> None:
        """Follows the pipeline's calls.

        Args:
            shares_seeds: Whether a call without `generator` gets one that all ranks seed with the first rank's draw.
        """
        self.agreement.group.control()  # making it is a collective
        if self._pipe is not None and callable(self._pipe):
            around_calls(self._pipe, lambda call: self._around(call, shares_seeds), patches)

    def _around(self, call: Callable[..., Any], shares_seeds: bool) -> Callable[..., Any]:
        def followed(*args: Any, **kwargs: Any) -> Any:
            self.agreement.begin_call()
            outer, self._call = self._call, object()
            vars(self._pipe).pop("_num_timesteps", None)  # the last call's, until this one knows
            try:
                if shares_seeds and not kwargs.get("generator"):
                    kwargs["generator"] = shared_generator(self._pipe, self.agreement)
                return call(*args, **kwargs)
            finally:
                self._call = outer

        return followed

    def progress(self) -> Progress:
        """What the pipeline says of its denoising."""
        scheduler = getattr(self._pipe, "scheduler", None)
        if self._call is None:
            return Progress(getattr(scheduler, "timesteps", None))
        index = getattr(scheduler, "step_index", None)
        return Progress(self._call, index if isinstance(index, int) else None)

    def steps(self) -> int | None:
        """How many denoising steps the current generation takes; None before that is known, and without a pipeline.

        With `strength` below 1, a pipeline leaves out the first of its scheduler's.
        """
        left_out = LEFT_OUT.get(type(self._pipe).__name__, 0)
        own = None if self._call is None else vars(self._pipe).get("_num_timesteps")
        if isinstance(own, int):
            return own - left_out
        scheduler = getattr(self._pipe, "scheduler", None)
        timesteps = getattr(scheduler, "timesteps", None)
        begin = getattr(scheduler, "begin_index", None) or 0
        return None if timesteps is None else len(timesteps) - begin - left_out

    def hook(self, transformer: nn.Module, patches: PatchSet, *, whole_inputs: bool, always: bool) -> None:
        """Lets several ranks compare what the transformer is given, at the first pass of each generation.

        Call it before anything that cuts the inputs is hooked.

        Args:
            whole_inputs: Whether every rank is given all inputs.
            always: Whether to compare at every pass.
        """
        if self.agreement.group.size == 1:
            return

        @torch.compiler.disable
        def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if args and isinstance(args[0], PackedBatch):
                return  # of samples that each rank brings its own of: all are gathered before the pass
            inputs = signature_of(module).bind(*args, **kwargs).arguments
            timestep = None if module.training and torch.is_grad_enabled() else inputs.get("timestep")
            first = self._begins(timestep)
            self._passes = 0 if first else self._passes + 1
            if first or always:
                self.agreement.compare(self._pass_inputs(inputs, timestep, whole_inputs))

        patches.hook(transformer.register_forward_pre_hook, compare, with_kwargs=True)

    def _begins(self, timestep: Any) -> bool:
        """Returns whether a pass is a generation's first. Reads the timestep outside of the pipeline's calls."""
        last, self._seen = self._seen, self.progress().generation
        if self._call is not None:
            return self._seen is not last
        before = self._timestep
        if timestep is not None:
            self._timestep = _value(timestep)
        rises = before is not None and self._timestep is not None and self._timestep > before
        first = self._seen is not last or rises
        if first:
            self.agreement.begin_call()
        return first

    def _pass_inputs(self, inputs: Mapping[str, Any], timestep: Any, whole: bool) -> PassInputs:
        guidance = None if self._call is None else getattr(self._pipe, "_guidance_scale", None)
        moment = None if timestep is None else f"{_value(timestep):.5g}"
        steps = self.steps(), moment, self._passes, guidance
        latents = list(_tensors(sample_of(inputs)))
        others = [value for name, value in list(inputs.items())[1:] if name != "timestep"]
        size = [(tuple(one.shape), one.dtype) for one in latents]
        return PassInputs(size, steps, latents, list(_tensors(others))) if whole else PassInputs(size, steps)


def shared_generator(pipe: Any, agreement: GenerationAgreement) -> torch.Generator:
    """A generator on the device that the pipeline computes on, which all ranks seed alike. Collective.

    That device may be another than the one that holds its weights: under CPU offload.
    """
    seed = agreement.seed(int(torch.randint(0, 2**62, (1,), device="cpu")))
    return torch.Generator(getattr(pipe, "_execution_device", None) or pipe.device).manual_seed(seed)


def _value(timestep: Any) -> float:
    return float(timestep.amax()) if isinstance(timestep, torch.Tensor) else float(timestep)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors, not empty, in a tensor or in lists of them."""
    if isinstance(value, torch.Tensor) and value.numel():
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _tensors(one)
