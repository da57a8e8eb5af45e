"""The transformers of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from dbsp_core.utils.errors import UserError
from dbsp_diffusers.models.table import known_architecture

_NAMES = ("transformer", "transformer_2")


def transformers_of(model: Any) -> dict[str, Any]:
    """Returns a pipeline's transformers by name, or the one that is given, as they are without torch.compile.

    One that has two names in the pipeline is returned once, by the first.

    Raises UserError for a pipeline without any or without room for attributes.
    """
    transformers: dict[str, Any] = {}
    for name, part in transformers_in(model).items():
        transformer = getattr(part, "_orig_mod", part)
        if all(transformer is not other for other in transformers.values()):
            transformers[name] = transformer
    if not transformers:
        raise UserError(f"db-SP parallelizes pipelines with a transformer, {type(model).__name__} has none")
    if not hasattr(model, "__dict__"):
        raise UserError(
            f"{type(model).__name__} has __slots__, and db-SP keeps attributes on a pipeline; pass its transformer"
        )
    return transformers


def transformers_in(model: Any) -> dict[str, Any]:
    """Returns a pipeline's transformers by name; a module itself as "transformer"; empty for anything else.

    In addition to `transformer` and `transformer_2` these are its other registered parts of a class that db-SP knows.
    """
    if not any(hasattr(model, name) for name in _NAMES):
        return {"transformer": model} if isinstance(model, nn.Module) else {}
    registered = getattr(model, "config", None)
    names = registered if isinstance(registered, Mapping) else ()
    # not by getattr, which in diffusers warns of names that are settings
    parts = {name: getattr(model, name, None) for name in _NAMES} | {
        name: part for name, part in getattr(model, "__dict__", {}).items() if name in names and name not in _NAMES
    }
    return {
        name: part
        for name, part in parts.items()
        if (isinstance(part, nn.Module) if name in _NAMES else _is_known(part))
    }


def _is_known(part: Any) -> bool:
    """Returns True if part of a pipeline is a transformer of a class that db-SP knows, compiled or not."""
    return isinstance(part, nn.Module) and known_architecture(getattr(part, "_orig_mod", part)) is not None
