"""The transformers of a pipeline."""

from __future__ import annotations

from typing import Any

from torch import nn

from dbsp_core.utils.errors import UserError

_NAMES = ("transformer", "transformer_2")


def transformers_of(model: Any) -> dict[str, Any]:
    """Returns a pipeline's transformers by name (or the given transformer), without torch.compile's wrapper.

    A transformer with two names is returned once, by the first. Raises UserError for a pipeline without transformers.
    """
    transformers: dict[str, Any] = {}
    for name, part in transformers_in(model).items():
        transformer = getattr(part, "_orig_mod", part)
        if all(transformer is not other for other in transformers.values()):
            transformers[name] = transformer
    if not transformers:
        raise UserError(f"expected a pipeline with a transformer, got {type(model).__name__}")
    return transformers


def transformers_in(model: Any) -> dict[str, Any]:
    """Returns a pipeline's transformers by name, a module as "transformer", or an empty mapping."""
    if not any(hasattr(model, name) for name in _NAMES):
        return {"transformer": model} if isinstance(model, nn.Module) else {}
    parts = {name: getattr(model, name, None) for name in _NAMES}
    return {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
