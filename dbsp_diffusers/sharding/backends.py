"""diffusers' attention backends: db-SP needs the native one, and cross-attention keeps the user's."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any

from torch import nn

from dbsp_diffusers.patching import PatchSet

__all__ = ["NativeBackend"]

_MISSING = object()


class NativeBackend:
    """Keeps the processors of self-attention at backend "native", which calls torch's scaled_dot_product_attention.

    A processor that other attention modules of the transformer have, too, is copied for self-attention.
    """

    def __init__(self, transformer: nn.Module, self_attentions: Sequence[nn.Module], patches: PatchSet) -> None:
        self._users: dict[int, tuple[Any, Any]] = {}
        """Each processor, by its id, with the backend that was set last."""
        ours = set(map(id, self_attentions))
        others = {id(getattr(part, "processor", None)) for part in transformer.modules() if id(part) not in ours}
        for attention in self_attentions:
            processor = getattr(attention, "processor", None)
            if id(processor) in others and processor is not None and not isinstance(processor, nn.Module):
                patches.set_attribute(attention, "processor", copy.copy(processor))
        self._self_attentions = self_attentions
        patches.on_detach(self._release)
        self.pin()

    def pin(self) -> None:
        """Sets "native" again: `set_attention_backend`, called since, then means the other attention modules."""
        native = _native()
        for attention in self._self_attentions:
            processor: Any = getattr(attention, "processor", None)
            if hasattr(processor, "_attention_backend") and vars(processor).get("_attention_backend") is not native:
                self._users[id(processor)] = processor, vars(processor).get("_attention_backend", _MISSING)
                processor._attention_backend = native

    def _release(self) -> None:
        for processor, backend in self._users.values():
            if backend is _MISSING:
                del processor._attention_backend
            else:
                processor._attention_backend = backend
        self._users.clear()


def _native() -> Any:
    """The native backend as a member of diffusers' enumeration, which torch.compile need not look up."""
    names = getattr(sys.modules.get("diffusers.models.attention_dispatch"), "AttentionBackendName", None)
    return "native" if names is None else names("native")
