"""Batches whose items differ in size: the items of each size are run together, one size after another."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import torch

from dbsp_core.utils.process import outside_inference
from dbsp_diffusers.models.token_sequence import Readings

Items = tuple[int, ...]
"""Positions of items in a batch, ascending."""

_parts = Readings()
"""By a tensor of integers its parts by items: what was read from a part once need not be again."""


def parts_by_size(sizes: Sequence[Hashable]) -> list[Items]:
    """Returns the items of each size, in the order in which sizes appear."""
    items_by_size: dict[Hashable, list[int]] = {}
    for item, size in enumerate(sizes):
        items_by_size.setdefault(size, []).append(item)
    return [tuple(items) for items in items_by_size.values()]


def part_of(inputs: Mapping[str, Any], items: Items, batch: int) -> dict[str, Any]:
    """Returns a forward pass's arguments by name for some items of a batch.

    Tensors [batch, …] and lists of `batch` are taken apart; all else is passed on.
    """
    return {name: _taken(value, items, batch) for name, value in inputs.items()}


def join_parts(outputs: Sequence[Any], parts: Sequence[Items]) -> Any:
    """Returns a batch's output from those of its parts: tensors [items, …], lists, or tuples or mappings of these."""
    first = outputs[0]
    if isinstance(first, Mapping):
        return type(first)(**{name: join_parts([output[name] for output in outputs], parts) for name in first})
    if isinstance(first, tuple):
        return tuple(join_parts(elements, parts) for elements in zip(*outputs, strict=True))
    position = {item: (part, index) for part, items in enumerate(parts) for index, item in enumerate(items)}
    by_item = [outputs[part][index] for part, index in (position[item] for item in sorted(position))]
    return torch.stack(by_item) if isinstance(first, torch.Tensor) else by_item


def _taken(value: Any, items: Items, batch: int) -> Any:
    if isinstance(value, list) and len(value) == batch:
        return [value[item] for item in items]
    if not isinstance(value, torch.Tensor) or value.shape[:1] != (batch,):
        return value
    if value.is_floating_point():
        return _rows(value, items)
    known = _parts.kept_for(value)
    if items not in known:
        known[items] = outside_inference(_rows)(value, items)
    return known[items]


def _rows(value: torch.Tensor, items: Items) -> torch.Tensor:
    """Returns some rows, as a view where they follow one another or are all the same."""
    if value.stride(0) == 0:
        return value[: len(items)]
    if items[-1] - items[0] == len(items) - 1:
        return value[items[0] : items[-1] + 1]
    return torch.cat([value[item : item + 1] for item in items])
