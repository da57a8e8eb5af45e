"""Replaces the attention inside attention modules, whose projections and norms stay, on diffusers' native backend."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from dbsp_core.comm.consistency import needs_gradients
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.models.gates import gate_by_head
from dbsp_diffusers.patching import PatchSet

Attend = Callable[..., torch.Tensor]
"""attend(q, k, v, scale=…) with q, k, v [B, H, n, D], and gate=… of their shape where the module has one; returns
[B, H, n, D]"""

_attends: WeakValueDictionary[int, Attend] = WeakValueDictionary()
"""Functions that compiled code calls, by number; each lives as long as the module that it is in."""
_numbers = itertools.count()


def _answer(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    number: torch.Tensor,
    scale: float | None,
    gate: torch.Tensor | None,
) -> torch.Tensor:
    gated = {} if gate is None else {"gate": gate}
    return _attends[int(number)](q, k, v, scale=scale, **gated)


_TAGS: dict[str, Any] = {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}
"""Keeps the operator out of CUDA graphs, which would replay a plan and its sizes; torch has it from 2.9 on."""


@torch.library.custom_op(
    "dbsp::attend",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor number, float? scale, Tensor? gate) -> Tensor",
    **_TAGS,
)
def _attend(*call: Any) -> torch.Tensor:
    """Calls a function of `_attends`. A number as int would have each layer compiled by itself, so it is a tensor."""
    return _answer(*call).contiguous()


@_attend.register_fake
def _(q: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def require_torch_attention() -> None:
    """Raises UserError if torch's scaled_dot_product_attention was replaced for all modules of this process.

    Libraries of kernels advise that. db-SP then finds no attention to replace, and the model's other attention would
    compute with something that no setting names.
    """
    current: Any = F.scaled_dot_product_attention
    if current is torch._C._nn.scaled_dot_product_attention:  # what torch itself puts there
        return
    module = getattr(current, "__module__", None) or type(current).__module__
    name = getattr(current, "__qualname__", None) or type(current).__qualname__
    raise UserError(
        f"torch.nn.functional.scaled_dot_product_attention was replaced by {module}.{name}, expected torch's own; "
        "leave it as torch has it, and choose kernels by the setting kernel, and for cross-attention by "
        "transformer.set_attention_backend"
    )


class SdpaOverride(TorchFunctionMode):
    """Replaces torch's scaled_dot_product_attention of a sequence with itself by another function, as a context.

    Attention to a different number of keys, such as an IP-Adapter's image's, which every rank has, stays torch's.

    Args:
        number: int64, the function's number in `_attends`.
        other_keys: True if attention to another sequence's keys is replaced.
        any_mask: True if a mask is ignored, rather than rejected.
        gate: What `gate_of` made of the module's tokens; None: it has none.
    """

    def __init__(
        self, number: torch.Tensor, any_mask: bool, other_keys: bool, gate: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self._number, self._any_mask, self._other_keys, self._gate = number, any_mask, other_keys, gate
        self.calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.unflatten:  # whose super() torch.compile does not trace within a mode
            return torch.unflatten(*args, **kwargs)
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        call = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
        if not self._other_keys and call["query"].shape[-2] != call["key"].shape[-2]:
            return func(*args, **kwargs)
        if (call.get("attn_mask") is not None and not self._any_mask) or call.get("is_causal"):
            raise UserError("db-SP replaces attention without a mask of its own; this model passes one")
        if call.get("dropout_p"):
            raise UserError(
                f"db-SP computes attention without dropout, got dropout_p={call['dropout_p']}; set it to 0"
            )
        self.calls += 1
        q, k, v, scale = call["query"], call["key"], call["value"], call.get("scale")
        device = q.device.type
        if torch.is_autocast_enabled(device):  # which casts what torch's own attention is given, and nothing within it
            q, k, v = (t.to(torch.get_autocast_dtype(device)) for t in (q, k, v))
            with torch.autocast(device, enabled=False):
                return self._answer(q, k, v, scale)
        return self._answer(q, k, v, scale)

    def _answer(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
        gate = None if self._gate is None else gate_by_head(self._gate, q)
        if needs_gradients(q, k, v) or not torch.compiler.is_compiling():
            return _answer(q, k, v, self._number, scale, gate)  # the operator has no backward: here graphs break
        out: torch.Tensor = torch.ops.dbsp.attend(q, k, v, self._number, scale, gate)
        return out


def intercept_attention(
    attention: nn.Module,
    attend: Attend,
    patches: PatchSet,
    *,
    any_mask: bool = False,
    other_keys: bool = False,
    skipped_by: str = "",
    gate: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """Lets `attend` compute the attention inside one attention module, whose projections and norms stay.

    While it runs, diffusers' backend is "native", which calls torch's scaled_dot_product_attention; the one that
    `set_attention_backend` has set is that of other modules. The module raises UserError when its attention is not
    reached: it would silently attend to only this rank's tokens.

    Args:
        attend: Called with q, k, v [B, H, n, D] and scale=…; within torch.compile it is one operator, without a break.
        any_mask: True if a mask that the module passes is ignored, as it says only which text is padding.
        other_keys: True if the module attends to another sequence's keys: k and v are then [B, H, m, D].
        skipped_by: Name of an argument that makes the module attend to nothing.
        gate: Makes of the module's hidden states [B, n, C] what `attend` is given as gate=…: [B, n, H · D], or what
            does not depend on tokens, [D + 1, D].
    """
    key = next(_numbers)
    _attends[key] = attend
    number = torch.tensor(key, device="cpu")
    names = getattr(sys.modules.get("diffusers.models.attention_dispatch"), "AttentionBackendName", None)
    native = "native" if names is None else names("native")  # a member, which torch.compile need not look up

    def intercepted(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        hidden: Any = kwargs.get("hidden_states", args[0] if args else None)
        mode = SdpaOverride(number, any_mask, other_keys, None if gate is None else gate(hidden))
        with mode, _backend(getattr(attention, "processor", None), native):
            output = forward(*args, **kwargs)
        if mode.calls != 1 and not (mode.calls == 0 and kwargs.get(skipped_by, False)):
            raise UserError(
                f"attention reached torch's scaled_dot_product_attention {mode.calls} times, expected once; "
                "keep to attention backend 'native' and to processors that call it"
            )
        return output

    # Keeps it alive, hidden from torch.compile, which would otherwise compile each layer by itself.
    vars(intercepted)["attend"] = attend
    patches.replace_forward(attention, intercepted)


@contextmanager
def _backend(processor: Any, name: Any) -> Iterator[None]:
    """Sets the backend of a processor that has one, and restores what it had."""
    if not hasattr(processor, "_attention_backend"):
        yield
        return
    before, processor._attention_backend = processor._attention_backend, name
    try:
        yield
    finally:
        if before is getattr(type(processor), "_attention_backend", None):
            del processor._attention_backend
        else:
            processor._attention_backend = before
