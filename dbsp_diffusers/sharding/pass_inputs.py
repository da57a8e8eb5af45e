"""The arguments of a forward pass as ranks compare and replace them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from dbsp_diffusers.models.token_sequence import Readings

_PLAIN = (bool, int, float, str, type(None), torch.dtype)


def named_tensors(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each tensor that is not empty in an argument, within lists and mappings too, with its name."""
    if isinstance(value, torch.Tensor):
        if value.numel() and value.layout == torch.strided and not hasattr(value, "device_mesh"):
            yield name, value
    elif isinstance(value, Mapping):
        for key, element in value.items():
            yield from named_tensors(f"{name}[{key!r}]", element)
    elif isinstance(value, (list, tuple)):
        for position, element in enumerate(value):
            yield from named_tensors(f"{name}[{position}]", element)


def plain_values(value: Any) -> Any:
    """Returns what ranks compare of an argument that is not a tensor: numbers, texts, and types of other objects."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Mapping):
        return [(str(key), plain_values(element)) for key, element in value.items()]
    if isinstance(value, (list, tuple)):
        return [plain_values(element) for element in value]
    return type(value).__name__


def with_tensors(value: Any, replaced: Mapping[int, torch.Tensor]) -> Any:
    """Returns an argument with tensors replaced, by their `id`; what holds none of them is returned itself."""
    if isinstance(value, torch.Tensor):
        return replaced.get(id(value), value)
    if isinstance(value, dict):
        changed = {key: with_tensors(element, replaced) for key, element in value.items()}
        return changed if any(changed[key] is not element for key, element in value.items()) else value
    if isinstance(value, (list, tuple)):
        items = [with_tensors(element, replaced) for element in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


class Constants:
    """Substitutes of tensors that a pipeline passes in every step, such as text embeddings.

    What is read from a tensor once, as long as the tensor is not written to, is then read once of its substitute too.
    """

    def __init__(self) -> None:
        self._known = Readings()
        """By the pipeline's tensor, its substitute from the second pass on."""

    def substitute(self, tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of these values, the same one as long as `tensor` is not written to."""
        known = self._known.kept_for(tensor)
        if not known:
            known["substitute"] = None
            return values
        if known["substitute"] is None:
            known["substitute"] = values.clone()
        else:
            known["substitute"].data.copy_(values)  # which is no new version: the values are as before
        substitute: torch.Tensor = known["substitute"]
        return substitute
