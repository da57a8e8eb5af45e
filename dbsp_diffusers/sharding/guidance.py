"""Guidance parallelism: each half of the ranks computes one of a denoising step's two CFG passes.

Pipelines such as Wan's call the transformer with the prompt, then without, and use both outputs afterwards. The first
call returns a tensor that is not computed yet. In the second call each half of the ranks computes one of the passes,
and the halves exchange the outputs. If the first output is used before a second call, both halves compute it then.
CogVideoX's pipelines have both passes in one batch, of which each half computes its half.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from dbsp_core.comm.consistency import check_consistent
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.process import log
from dbsp_diffusers.models import architecture_of
from dbsp_diffusers.packed_samples import PackedBatch
from dbsp_diffusers.patching import Arguments, Entered, PatchSet, cache_contexts, sample_of, signature_of
from dbsp_diffusers.sharding.generations import Generations
from dbsp_diffusers.sharding.halves import Halves
from dbsp_diffusers.sharding.step_caches import names_of_caches

_PAIR = {"cond", "uncond"}
"""What diffusers' pipelines call the cache contexts of two calls whose outputs are used after both."""
_CACHES = ("FBC", "MagCache", "TaylorSeer")
"""How the names of cache hooks begin that keep a state per cache context: skipped is what one process skips."""
_GRADIENTS = (
    "guidance parallelism computes no gradients; call the transformer under torch.no_grad(), or enable db-SP without "
    "`guidance`"
)
_ALONE = (
    "guidance parallelism: %s ran a pass without a second one, and each half of the ranks computes all of it; leave "
    "`guidance` out if guidance_scale is 1 or less"
)


@dataclass
class _Call:
    """One call of the transformer.

    Attributes:
        forward: Computes the call, in its cache context; returns the transformer's outputs.
        context: Name of the cache context, or None.
        new: True if ranks compare the inputs of this call.
        output: The output, once it is computed.
    """

    forward: Callable[[], Any]
    context: str | None
    new: bool
    output: torch.Tensor | None = None

    def compute(self) -> torch.Tensor:
        """Returns the output, which is computed unless it is there."""
        if self.output is None:
            (self.output,) = self.forward()
        return self.output


class _Later(torch.Tensor):
    """A tensor that is computed when it is used. Its own storage is empty.

    Attributes:
        made: Returns the values.
    """

    made: Callable[[], torch.Tensor]

    @classmethod
    def from_function(cls, made: Callable[[], torch.Tensor]) -> _Later:
        later: _Later = torch.Tensor._make_subclass(cls, torch.empty(0, device="cpu"))
        later.made = made
        return later

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__ and type(args[0]) is cls:  # QwenImage's pipelines slice the first output
            return cls.from_function(lambda: args[0].made()[args[1]])
        args, kwargs = tree_map_only(cls, lambda one: one.made(), (args, kwargs or {}))
        return func(*args, **kwargs)


@dataclass
class GuidedCalls:
    """The calls of one transformer, which two halves of the ranks share.

    Attributes:
        generations: Checks of each video that all ranks make.
        always: True if ranks compare the inputs of every call.
    """

    transformer: nn.Module
    halves: Halves
    generations: Generations
    always: bool
    _first: _Call | None = None
    """The call that waits for a second one."""
    _entered: Callable[[], Entered | None] = lambda: None
    """Returns the cache context that is entered."""
    _warned: bool = False
    _compiled: Callable[..., Any] | None = None
    """What `transformer.compile()` has made of a call."""

    def attach(self, patches: PatchSet) -> None:
        """Takes over the transformer's calls, with all hooks. Call it once everything else is attached.

        `transformer.compile()`, called before or after, compiles what one half computes.
        """
        self._entered = cache_contexts(self.transformer, patches)
        self._compiled = compiled = self.transformer._compiled_call_impl

        def compile_calls(*args: Any, **kwargs: Any) -> None:
            self._compiled = torch.compile(MethodType(nn.Module._call_impl, self.transformer), *args, **kwargs)

        def stay_compiled() -> None:
            if self._compiled is not compiled:
                self.transformer._compiled_call_impl = self._compiled

        patches.on_detach(stay_compiled)
        if compiled is not None:  # Module.__call__ would call it instead of `_call_impl`
            patches.set_attribute(self.transformer, "_compiled_call_impl", None)
        patches.set_attribute(self.transformer, "compile", compile_calls)
        patches.set_attribute(self.transformer, "_call_impl", self._called)  # what Module.__call__ calls

    @torch.compiler.disable
    def _called(self, *args: Any, **kwargs: Any) -> Any:
        outputs = self._outputs(args, kwargs)
        self.generations.end_pass()
        return outputs

    def _outputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Returns what the transformer does, or with an output that is computed later. Collective."""
        # 1. Inputs that all ranks agree on.
        kind = architecture_of(self.transformer).guidance
        self._require_supported(kind, args)
        (args, kwargs), meeting = self.generations.check_inputs(self.transformer, args, kwargs, always=self.always)
        if meeting is not None:
            meeting.check()
        inputs = signature_of(self.transformer).bind(*args, **kwargs).arguments
        first, self._first = self._first, None
        new = meeting is not None
        call = self._call(args, kwargs, new)
        # 2. What two halves can share.
        if not inputs.get("return_dict", True):
            batch = len(sample_of(inputs))
            if kind == "batch" and batch % 2 == 0:
                half = self._call(*self._half_of(args, kwargs, batch), new)
                return (torch.cat(self._exchanged(half, half)),)
            if first is not None and first.output is None and {first.context, call.context} == _PAIR:
                first.output, second = self._exchanged(first, call)
                return (second,)
            if kind == "calls" and call.context in _PAIR:
                self._first = call
                return (_Later.from_function(lambda: self._alone(call)),)
        # 3. Everything else.
        self._warn()
        return call.forward()

    def _require_supported(self, kind: str | None, args: tuple[Any, ...]) -> None:
        """Raises UserError for what two halves cannot share."""
        if args and isinstance(args[0], PackedBatch):
            raise UserError("guidance parallelism is for pipelines; enable db-SP without `guidance` for packed passes")
        if torch.is_grad_enabled():
            raise UserError(_GRADIENTS)
        blocks = architecture_of(self.transformer).blocks_of(self.transformer)
        for name in sorted(names_of_caches(self.transformer, blocks)):
            if kind == "batch" or not name.startswith(_CACHES):
                raise UserError(
                    f"guidance parallelism: each half of the ranks would skip other layers than one process does with "
                    f"{name}; take the cache off (transformer.disable_cache()), or enable db-SP without `guidance`"
                )

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any], new: bool) -> _Call:
        """Returns a call of the transformer in the current cache context."""
        # the class's own, around forward and all of its hooks: the transformer's attribute is `_called`
        context = self._entered()
        compute = self._compiled or MethodType(nn.Module._call_impl, self.transformer)

        def forward() -> Any:
            with nullcontext() if context is None else context[1]():
                return compute(*args, **kwargs)

        return _Call(forward, None if context is None else context[0], new)

    def _half_of(self, args: tuple[Any, ...], kwargs: dict[str, Any], batch: int) -> Arguments:
        """Returns arguments with this half's items of each tensor [batch, ...]."""

        def half(value: Any) -> Any:
            cut = isinstance(value, torch.Tensor) and value.ndim > 0 and len(value) == batch
            return value.chunk(2)[int(self.halves.second)] if cut else value

        return tuple(map(half, args)), {name: half(value) for name, value in kwargs.items()}

    def _exchanged(self, first: _Call, second: _Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Computes this half's call, and returns the outputs of both. Collective."""
        mine = second if self.halves.second else first
        output: torch.Tensor | None = None
        problem: Exception | None = None
        try:
            output = mine.compute()
        except Exception as error:  # any error: the other half waits for this one
            problem = error
        if first.new or second.new:
            check_consistent(self.halves.ranks.control(), problem, {})
        if output is None:
            raise problem or RuntimeError("a pass has neither an output nor an error")
        return self.halves.exchange(output)

    def _alone(self, call: _Call) -> torch.Tensor:
        """Returns the output of a call, which both halves compute unless a second call has come."""
        if call.output is None:
            self._warn()
        return call.compute()

    def _warn(self) -> None:
        """Says once that half of the ranks do what the other half does."""
        if not self._warned and self.halves.ranks.rank == 0:
            log.warning(_ALONE, type(self.transformer).__name__)
        self._warned = True
