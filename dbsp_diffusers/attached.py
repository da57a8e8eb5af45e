"""State that db-SP has attached to a pipeline's transformers, kept on them and found again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from dbsp_core.runtime.session import AttentionSession
from dbsp_core.utils.errors import fingerprint_of
from dbsp_diffusers.models.transformers import transformers_in
from dbsp_diffusers.patching import PatchSet

STATE = "_dbsp"
"""Attribute of a pipeline and its transformers: there, rather than in a table here, so that all are freed together."""


@dataclass(frozen=True)
class Attached:
    """State that is attached to a pipeline's transformers, or to one without a pipeline."""

    patches: PatchSet
    sessions: Sequence[tuple[nn.Module, AttentionSession]]  # Each transformer with its session
    framework: str


def carried_by(transformer: nn.Module) -> list[str]:
    """Returns what a transformer carries in addition to its class's weights: adapters, and weights of integers."""
    adapters = {name: getattr(part, "merged_adapters", ()) for part in transformer.modules() for name in _active(part)}
    carried = [f"LoRA {name}" + (" (fused)" if name in merged else "") for name, merged in sorted(adapters.items())]
    integers = {p.dtype for p in transformer.parameters() if not (p.is_floating_point() or p.is_complex())}
    return carried + [f"weights of {name}" for name in sorted(str(dtype).removeprefix("torch.") for dtype in integers)]


def _active(part: nn.Module) -> Sequence[str]:
    """Returns the names of a layer's adapters that are in use, fused into its weights or not."""
    both = (getattr(part, name, ()) for name in ("active_adapters", "merged_adapters"))
    return [name for names in both if isinstance(names, (list, tuple)) for name in names]


def weights_fingerprint(transformer: nn.Module) -> int:
    """Returns a fingerprint of a transformer's parameters, by name, shape, dtype and type, and adapters in use."""
    weights = [
        (name, tuple(p.shape), str(p.dtype), type(p.data).__name__) for name, p in transformer.named_parameters()
    ]
    return fingerprint_of((weights, carried_by(transformer)))


def attached_to(model: Any) -> Attached | None:
    """Returns what is attached to a pipeline or the first of its transformers that has anything, or None."""
    return next(iter(all_attached_to(model)), None)


def all_attached_to(model: Any) -> list[Attached]:
    """Returns all that is attached to a pipeline and its transformers. torch.compile may have wrapped them.

    A pipeline has it also if its transformers were exchanged since. There are several where its transformers were
    enabled one by one.
    """
    parts = (getattr(part, "_orig_mod", part) for part in transformers_in(model).values())
    states = (getattr(part, "__dict__", {}).get(STATE) for part in (model, *parts))
    return list({id(state): state for state in states if state is not None}.values())
