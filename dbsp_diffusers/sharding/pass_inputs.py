"""The arguments of a forward pass: as ranks compare and replace them, and a batch of several sizes taken apart."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from dbsp_core.utils.errors import fingerprint_of
from dbsp_core.utils.process import outside_inference
from dbsp_diffusers.models.token_sequence import Readings
from dbsp_diffusers.patching import Arguments
from dbsp_diffusers.sharding.generation_checks import (
    ARGUMENTS_DIFFER,
    CONDITION_DIFFERS,
    CONDITION_DRIFTS,
    LATENTS_DIFFER,
    LATENTS_DRIFT,
    LENGTHS_DIFFER,
    SIZES_DIFFER,
    STEPS_DIFFER,
)

_PLAIN = (bool, int, float, str, type(None), torch.dtype)


BEGIN = 2
"""Passes that a generation begins with: with guidance, those of its first step."""


@dataclass(frozen=True)
class Pass:
    """A forward pass that has begun on this rank."""

    arguments: Arguments  # As this rank was given them
    sample: Any  # The latents that it denoises, a tensor or a list
    latents: dict[str, torch.Tensor]  # Tensors of the sample, by name
    conditions: dict[str, torch.Tensor]  # All other tensors, by name
    plain: dict[str, Any]  # Arguments that are not tensors, by name
    generation: int  # Number of the generation, counted on this rank
    number: int  # Number of the pass in its generation
    step_index: int | None  # The scheduler's, in a call of the pipeline
    is_new: bool  # True if ranks have not compared such a pass in this generation, or the one before it failed
    keeps_inputs: bool  # True if each rank computes with its own inputs, as in training

    @property
    def compared(self) -> bool:
        """True if ranks meet before it."""
        return self.is_new or self.keeps_inputs

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Latents, then conditions."""
        return [*self.latents.values(), *self.conditions.values()]

    @property
    def messages(self) -> list[str]:
        """What is said of each tensor if it differs between ranks."""
        begins = self.number < BEGIN
        latents, condition = (LATENTS_DIFFER, CONDITION_DIFFERS) if begins else (LATENTS_DRIFT, CONDITION_DRIFTS)
        return [latents] * len(self.latents) + [condition.format(name=name) for name in self.conditions]

    @property
    def device(self) -> torch.device:
        """The GPU that tensors are on, if any is on one."""
        devices = [tensor.device for tensor in self.tensors]
        return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))

    @property
    def description(self) -> object:
        """All but the values of tensors, to be compared by `repr`."""
        return self.number, self.step_index, sorted(self.plain.items()), kinds_of(self.latents | self.conditions)

    def fingerprints(self, *of_generation: object) -> dict[str, int]:
        """Returns fingerprints of all but the values of tensors, by message; `of_generation` are compared, too."""
        plain = {name: value for name, value in self.plain.items() if name != "return_dict"}
        described = {
            SIZES_DIFFER: kinds_of(self.latents),
            STEPS_DIFFER: (self.number, of_generation),
            LENGTHS_DIFFER: kinds_of(self.conditions),
            ARGUMENTS_DIFFER.format(names=", ".join(plain) or "that are not tensors"): sorted(plain.items()),
        }
        return {message: fingerprint_of(value) for message, value in described.items()}


def named_tensors(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns each tensor that is not empty in a pass's arguments, within lists and mappings too, by name."""
    return {
        f"{name}{keystr(path)}": leaf
        for name, value in inputs.items()
        for path, leaf in tree_flatten_with_path(value)[0]
        if isinstance(leaf, torch.Tensor) and leaf.numel() and leaf.layout == torch.strided
        if not hasattr(leaf, "device_mesh")
    }


def plain_values(value: Any) -> Any:
    """Returns what ranks compare of an argument that is not a tensor: numbers, texts, and types of other objects."""
    return tree_map(lambda leaf: leaf if isinstance(leaf, _PLAIN) else type(leaf).__name__, value)


def kinds_of(tensors: Mapping[str, torch.Tensor]) -> tuple[object, ...]:
    """Returns what ranks must have alike of tensors, by name, but for their values."""
    return tuple((name, tuple(tensor.shape), tensor.dtype, tensor.device.type) for name, tensor in tensors.items())


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
