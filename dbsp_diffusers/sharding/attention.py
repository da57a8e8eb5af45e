"""Replaces the attention inside attention modules, keeping projections and norms, on diffusers' native backend."""

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
"""attend(q, k, v, scale=…[, gate=…]) with q, k, v and optional gate [B, H, n, D] → [B, H, n, D]"""

_attends: WeakValueDictionary[int, Attend] = WeakValueDictionary()
"""Functions called by compiled code, by number; they live as long as their module."""
_numbers = itertools.count()


def _answer(*call: Any) -> torch.Tensor:
    """Calls a function of `_attends`, by (q, k, v, number, scale, gate)."""
    *qkv, number, scale, gate = call
    gated = {} if gate is None else {"gate": gate}
    return _attends[int(number)](*qkv, scale=scale, **gated)


_TAGS: dict[str, Any] = {"tags": (torch.Tag.cudagraph_unsafe,)} if hasattr(torch.Tag, "cudagraph_unsafe") else {}
"""Excludes the operator from CUDA graphs, which would replay a plan and its sizes; in torch since 2.9."""


@torch.library.custom_op(
    "dbsp::attend",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor number, float? scale, Tensor? gate) -> Tensor",
    **_TAGS,
)
def _attend(*call: Any) -> torch.Tensor:
    # The number is a tensor, since an int would compile each layer separately
    return _answer(*call).contiguous()


@_attend.register_fake
def _(q: torch.Tensor, *_: Any) -> torch.Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def require_torch_attention() -> None:
    """Raises UserError if torch's scaled_dot_product_attention was replaced globally, as kernel libraries suggest.

    db-SP could then not find attention to replace, and other attention would use an unknown kernel.
    """
    current: Any = F.scaled_dot_product_attention
    if current is torch._C._nn.scaled_dot_product_attention:  # torch's original
        return
    module = getattr(current, "__module__", None) or type(current).__module__
    name = getattr(current, "__qualname__", None) or type(current).__qualname__
    raise UserError(
        f"torch.nn.functional.scaled_dot_product_attention was replaced by {module}.{name}, expected torch's own; "
        "leave it as torch has it, and choose kernels by the setting kernel, and for cross-attention by "
        "transformer.set_attention_backend"
    )


class SdpaOverride(TorchFunctionMode):
    """Context that replaces torch's scaled_dot_product_attention; see `intercept_attention`.

    Attention to another number of keys, such as an IP-Adapter's replicated image, is unchanged without `other_keys`.
    `number` (int64) is the function's in `_attends`, and `gate` the result of `gate_of` for the module's tokens.
    """

    def __init__(self, number: torch.Tensor, any_mask: bool, other_keys: bool, gate: torch.Tensor | None) -> None:
        super().__init__()
        self._number, self._any_mask, self._other_keys, self._gate = number, any_mask, other_keys, gate
        self.calls = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.unflatten:  # torch.compile cannot trace its super() within a mode
            return torch.unflatten(*args, **kwargs)
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        call = dict(zip(("query", "key", "value", "attn_mask", "dropout_p", "is_causal"), args, strict=False)) | kwargs
        if not self._other_keys and call["query"].shape[-2] != call["key"].shape[-2]:
            return func(*args, **kwargs)
        if (call.get("attn_mask") is not None and not self._any_mask) or call.get("is_causal"):
            raise UserError("db-SP does not support attention with the model's own mask; call `disable` first")
        if dropout := call.get("dropout_p"):
            raise UserError(f"db-SP computes attention without dropout, got dropout_p={dropout}; set it to 0")
        self.calls += 1
        q, k, v, scale = call["query"], call["key"], call["value"], call.get("scale")
        device = q.device.type
        if torch.is_autocast_enabled(device):  # autocast would cast the inputs of torch's attention
            q, k, v = (t.to(torch.get_autocast_dtype(device)) for t in (q, k, v))
            with torch.autocast(device, enabled=False):
                return self._answer(q, k, v, scale)
        return self._answer(q, k, v, scale)

    def _answer(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
        gate = None if self._gate is None else gate_by_head(self._gate, q)
        if needs_gradients(q, k, v) or not torch.compiler.is_compiling():
            # The operator has no backward, so the graph breaks here
            return _answer(q, k, v, self._number, scale, gate)
        return torch.ops.dbsp.attend(q, k, v, self._number, scale, gate)


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
    """Computes the attention inside one attention module with `attend`, keeping projections and norms.

    Within the module, diffusers' backend is "native", which calls torch's scaled_dot_product_attention;
    `set_attention_backend` still applies to other modules. The module raises UserError if its attention is not
    reached, since it would silently attend to this rank's tokens only.

    Args:
        attend: One operator without graph break within torch.compile.
        any_mask: True to ignore the module's mask, which only marks text padding.
        other_keys: True if the module attends to another sequence's keys; k and v are then [B, H, m, D].
        skipped_by: Name of an argument that makes the module skip attention.
        gate: Maps the module's hidden states [B, n, C] to [B, n, H · D], or to [D + 1, D] independent of tokens.
    """
    key = next(_numbers)
    _attends[key] = attend
    number = torch.tensor(key, device="cpu")
    names = getattr(sys.modules.get("diffusers.models.attention_dispatch"), "AttentionBackendName", None)
    native = "native" if names is None else names("native")  # enum member, so that torch.compile need not look it up

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

    # Keep it alive where torch.compile does not see it, or each layer would be compiled separately
    vars(intercepted)["attend"] = attend
    patches.replace_forward(attention, intercepted)


@contextmanager
def _backend(processor: Any, name: Any) -> Iterator[None]:
    """Sets a processor's backend, if it has one, and restores it afterwards."""
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
