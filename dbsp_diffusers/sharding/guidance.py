"""Guidance parallelism: each half of the ranks computes one of a denoising step's two CFG passes.

Pipelines such as Wan's call the transformer with the prompt, then without, and then use both outputs. For each call,
one half of the ranks computes it and the other returns a tensor of NaN. At the end of the second call, the halves
exchange outputs, and the first output is written into that tensor. CogVideoX's pipelines run both passes in one batch,
which is split over the halves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from dbsp_core.comm.consistency import agree, attempt
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.utils.errors import UserError, fingerprint_of
from dbsp_core.utils.process import log
from dbsp_diffusers.devices import NO_DEVICE, require_own_gpus, use_model_device
from dbsp_diffusers.models import architecture_of
from dbsp_diffusers.models.transformers import transformers_of
from dbsp_diffusers.packed.samples import PackedBatch
from dbsp_diffusers.patching import Arguments, PatchSet, cache_contexts
from dbsp_diffusers.sharding.generation_checks import GenerationChecks
from dbsp_diffusers.sharding.generations import Generations
from dbsp_diffusers.sharding.pass_inputs import Pass
from dbsp_diffusers.sharding.step_caches import names_of_caches
from dbsp_kernels.segments import to_device

_PARTNERS = {"cond": "uncond", "uncond": "cond", "pred_cond": "pred_uncond", "pred_uncond": "pred_cond"}
"""Names of the two cache contexts in diffusers' pipelines and guiders that use outputs after both calls."""
_OF_SECOND_HALF = ("uncond", "pred_uncond")  # contexts computed by the second half
_CACHES = ("FBC", "MagCache", "TaylorSeer")
"""Name prefixes of cache hooks with state per cache context, which skip the same layers as one process."""
_SUMS = 64  # number of sums by which halves compare a tensor
_NO_SECOND = (
    "guidance parallelism: a pass in cache context {first!r} was not followed by one in {second!r} of the same step, "
    "so half of the ranks have no output of it; remove `guidance`, or run passes without a second one outside of "
    "transformer.cache_context"
)
GUIDANCE_DIFFERS = "guidance differs on rank(s) {}; give all ranks the same"
_PASSES_DIFFER = (
    "guidance parallelism: the arguments of a CFG pass, or the shapes of its tensors, differ on rank(s) {}; give all "
    "ranks the same"
)


@dataclass(frozen=True)
class Halves:
    """The two halves of the ranks of one video."""

    ranks: SequenceGroup  # all ranks
    half: SequenceGroup  # this rank's half

    @classmethod
    def of(cls, guidance: object, model: Any, ranks: SequenceGroup) -> Halves:
        """Returns the halves of the ranks of a pipeline or transformer, for the user's `guidance`. Collective.

        Raises UserError on all ranks if their number is odd, or if the model runs guidance differently.
        """

        def check() -> tuple[int, int]:
            if guidance is not True:
                raise UserError(f"guidance must be True or False, got {guidance!r}")
            if ranks.size % 2:
                raise UserError(f"guidance=True needs an even number of ranks, got {ranks.size}")
            transformers = transformers_of(model).values()
            for transformer in transformers:
                if architecture_of(transformer).guidance is None:
                    raise UserError(
                        f"guidance=True: db-SP does not know how pipelines run the two CFG passes of "
                        f"{type(transformer).__name__}; remove guidance"
                    )
            return use_model_device(transformers, ranks)  # device for a half's communicator

        device, problem = attempt(check)
        numbers = agree(ranks.control(), {GUIDANCE_DIFFERS: 1}, problem=problem, numbers=device or NO_DEVICE)
        require_own_gpus(ranks, numbers)
        size = ranks.size // 2
        return cls(ranks, ranks.part(size * (ranks.rank // size), size))

    @property
    def second(self) -> bool:
        """True if this rank is in the second half."""
        return self.ranks.rank >= self.half.size

    def exchange(self, mine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the tensors of the first and the second half, of equal shape and dtype. Collective.

        Each rank exchanges its tensor with one rank of the other half.
        """
        splits = [0] * self.ranks.size
        splits[(self.ranks.rank + self.half.size) % self.ranks.size] = mine.numel()
        other = self.ranks.all_to_all(mine.reshape(-1), splits, splits).view(mine.shape)
        return (other, mine) if self.second else (mine, other)


@dataclass(frozen=True)
class _First:
    """The first of two CFG passes, computed by one half."""

    context: str  # name of its cache context
    generation: int  # number of its generation
    step_index: int | None  # the scheduler's, within a pipeline call
    is_called: bool  # True within a pipeline call
    output: torch.Tensor  # NaN in the half that has not computed it


@dataclass
class GuidedCalls:
    """The calls of one transformer, split over two halves of the ranks."""

    transformer: nn.Module
    halves: Halves
    generations: Generations  # checks among all ranks
    always: bool  # True to compare inputs of every call
    _first: _First | None = None  # the pass that awaits its second pass
    _entered: Callable[[], str | None] = lambda: None  # returns the name of the current cache context
    _warned: bool = False

    def __post_init__(self) -> None:
        self._checks = GenerationChecks(self.halves.half)
        self.generations.ends.append(self._end_call)

    def attach(self, patches: PatchSet) -> None:
        """Takes over the transformer's calls including hooks; call it last.

        Compiled blocks stay compiled; a compiled whole call (`transformer.compile()`) is not used.
        """
        self._entered = cache_contexts(self.transformer, patches)
        # Module.__call__ prefers _compiled_call_impl
        patches.set_attribute(self.transformer, "_compiled_call_impl", None)
        patches.set_attribute(self.transformer, "_call_impl", self._called)

    @torch.compiler.disable
    def _called(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._outputs(args, kwargs)
        self.generations.end_pass()
        return outputs

    def _outputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns the transformer's output, or a tensor that the second call overwrites. Collective."""
        # 1. Begin the pass; decide its kind locally
        first, self._first = self._first, None
        kind = architecture_of(self.transformer).guidance
        caches = self._supported_caches(kind, args)
        begun = self.generations.begin_pass(self.transformer, args, kwargs, always=self.always)
        context, is_plain = self._entered(), not begun.plain.get("return_dict", True)
        shared_context = context if is_plain and kind == "calls" and context in _PARTNERS else None
        if first is not None and first.generation != begun.generation and first.is_called:
            first = None  # its call failed
        # 2. Passes split over the halves
        if first is not None:
            place = begun.generation, begun.step_index
            if shared_context != _PARTNERS[first.context] or place != (first.generation, first.step_index):
                raise UserError(_NO_SECOND.format(first=first.context, second=_PARTNERS[first.context]))
            return (self._second_pass(first, shared_context, begun),)
        if is_plain and kind == "batch" and len(begun.sample) % 2 == 0:
            return (self._halved_batch(begun),)
        if shared_context is not None and self.generations.has_second_pass():
            return (self._first_pass(shared_context, begun),)
        # 3. Passes that all ranks compute, or one half if a step cache keeps the context's state there
        if not self._warned and self.halves.ranks.rank == 0:
            log.warning(
                f"guidance parallelism: {type(self.transformer).__name__} ran a pass without a second one, so both "
                "halves of the ranks computed it; remove `guidance` if guidance_scale is 1 or less"
            )
        self._warned = True
        if shared_context is not None and caches:
            output, problem = self._half_pass(shared_context, begun, self._compared(begun))
            return (self._exchanged(output, problem, begun)[int(shared_context in _OF_SECOND_HALF)],)
        outputs, problem = self._computed(begun, self.generations.agree(begun))
        self._raise_together(problem)
        return outputs

    def _supported_caches(self, kind: str | None, args: tuple[Any, ...]) -> list[str]:
        """Returns the names of the step caches. Raises UserError for unsupported caches and passes."""
        if args and isinstance(args[0], PackedBatch):
            raise UserError("guidance parallelism is for pipelines; enable db-SP without `guidance` for packed passes")
        if torch.is_grad_enabled():
            raise UserError(
                "guidance parallelism does not support gradients; call the transformer under torch.no_grad(), or "
                "enable db-SP without `guidance`"
            )
        blocks = architecture_of(self.transformer).blocks_of(self.transformer)
        caches = sorted(names_of_caches(self.transformer, blocks))
        for name in caches:
            if kind == "batch" or not name.startswith(_CACHES):
                raise UserError(
                    f"guidance parallelism: with {name} each half of the ranks would skip other layers than one "
                    f"process; disable the cache (transformer.disable_cache()), or enable db-SP without `guidance`"
                )
        return caches

    def _first_pass(self, context: str, begun: Pass) -> torch.Tensor:
        """Returns the first call's output in the half that computes it, NaN in the other. Collective."""
        output, problem = self._half_pass(context, begun, self._compared(begun))
        if problem is not None:
            self._raise_together(problem)  # the other half raises it in the second pass
        place = begun.generation, begun.step_index, self.generations.is_called
        self._first = _First(context, *place, output)
        return output

    def _second_pass(self, first: _First, context: str, begun: Pass) -> torch.Tensor:
        """Returns the second call's output, and fills in the first call's where missing. Collective.

        Only the half that computes the pass compares inputs first; the other is still computing the first pass.
        """
        output, problem = self._half_pass(context, begun, None)
        is_mine = self._is_mine(context)
        outputs = self._exchanged(output if is_mine else first.output, problem, begun)
        if is_mine:  # the first pass was the other half's
            first.output.copy_(outputs[int(not self.halves.second)])
        return outputs[int(context in _OF_SECOND_HALF)]

    def _halved_batch(self, begun: Pass) -> torch.Tensor:
        """Returns the output of both passes in one batch, split over the halves. Collective."""
        batch = len(begun.sample)

        def half(value: Any) -> Any:
            is_cut = isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == batch
            return value.chunk(2)[int(self.halves.second)] if is_cut else value

        outputs, problem = self._computed(begun, self._compared(begun), half)
        output = begun.sample if outputs is None else outputs[0]
        return torch.cat(self._exchanged(output, problem, begun))

    def _half_pass(
        self, context: str, begun: Pass, arguments: Arguments | None
    ) -> tuple[torch.Tensor, Exception | None]:
        """Returns a pass's output (NaN in the other half) and its error, if any. Collective within a half."""
        # 1. Shape and dtype of the output for a sample [B, tokens, channels] or [B, channels, F, H, W]
        sample, transformer = begun.sample, cast(Any, self.transformer)
        if sample.ndim == 3:
            shape = torch.Size((*sample.shape[:2], transformer.proj_out.out_features))
        else:
            shape = torch.Size((len(sample), transformer.config.out_channels, *sample.shape[2:]))
        device = sample.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else sample.dtype
        missing = sample.new_full(shape, math.nan, dtype=dtype)
        # 2. The pass
        if not self._is_mine(context):
            return missing, None
        outputs, problem = self._computed(begun, arguments)
        if outputs is None:
            return missing, problem
        output: torch.Tensor = outputs[0]
        if (output.shape, output.dtype) != (shape, dtype):
            return missing, UserError(
                f"guidance parallelism: expected {type(self.transformer).__name__} to return {dtype} {tuple(shape)}, "
                f"got {output.dtype} {tuple(output.shape)}; remove `guidance`"
            )
        return output, None

    def _is_mine(self, context: str) -> bool:
        """Returns True if this rank's half computes the passes of a context."""
        return self.halves.second == (context in _OF_SECOND_HALF)

    def _compared(self, begun: Pass) -> Arguments | None:
        """Returns a pass's arguments if all ranks compare them, else None. Collective."""
        return self.generations.agree(begun) if begun.compared else None

    def _computed(
        self, begun: Pass, arguments: Arguments | None, cut: Callable[[Any], Any] = lambda value: value
    ) -> tuple[Any, Exception | None]:
        """Returns the transformer's outputs or its error; `cut` maps an argument to this half's part.

        Collective within a half if `arguments` is None.
        """
        # the class's function, with forward and hooks; the instance's attribute is `_called`
        compute = MethodType(nn.Module._call_impl, self.transformer)

        def outputs() -> Any:
            args, kwargs = arguments or self.generations.agree(begun, self._checks)
            return compute(*map(cut, args), **{name: cut(value) for name, value in kwargs.items()})

        return attempt(outputs)  # the other half waits

    def _exchanged(
        self, output: torch.Tensor, problem: Exception | None, begun: Pass
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the outputs of both halves, unless one has a problem. Collective.

        Also exchanges sums of each rank's inputs, to detect drift between the halves.
        """
        # 1. Agree on the host, without waiting for devices
        self._raise_together(problem, begun, output)
        # 2. Exchange [sums, output] as bytes
        by_tensor = [to_device(_sums(tensor), output.device) for tensor in begun.tensors]
        sums = torch.cat(by_tensor)  # float32[tensors * _SUMS]
        halves = self.halves.exchange(torch.cat([sums.view(torch.uint8), output.reshape(-1).view(torch.uint8)]))
        # 3. Compare in the second half, and gather (within a pipeline call, at the scheduler's step)
        drift = self.generations.checks.drift
        first, second = (half[: sums.nbytes].view(sums.dtype).split(_SUMS) for half in halves)
        drift.compare(begun.messages, second if self.halves.second else first, first)
        if not self.generations.is_called:
            drift.gather(output.device)
        first_output, second_output = (half[sums.nbytes :].view(output.dtype).view(output.shape) for half in halves)
        return first_output, second_output

    def _raise_together(
        self, problem: Exception | None, begun: Pass | None = None, output: torch.Tensor | None = None
    ) -> None:
        """Raises on all ranks if one has a problem or is at another pass. Collective."""
        passed = None if begun is None or output is None else (begun.description, output.shape, output.dtype)
        try:
            agree(self.halves.ranks.control(), {_PASSES_DIFFER: fingerprint_of(passed)}, problem=problem)
        except ValueError:
            if problem is None or isinstance(problem, UserError):
                raise
            raise problem from None

    def _end_call(self) -> None:
        """Raises UserError on all ranks if a pipeline call ended between two passes of the halves."""
        first, self._first = self._first, None
        if first is not None and first.is_called:
            raise UserError(_NO_SECOND.format(first=first.context, second=_PARTNERS[first.context]))


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """Returns sums of parts of a tensor, float32[_SUMS]."""
    flat = tensor.detach().float().reshape(-1)
    return F.pad(flat, (0, -flat.numel() % _SUMS)).view(_SUMS, -1).sum(dim=1)
