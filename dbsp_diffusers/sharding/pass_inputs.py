"""Arguments of a forward pass: comparing and replacing them, and splitting a batch by sizes."""

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

_SIZES_DIFFER = "the size of the video differs on rank(s) {}, or its batch or dtype; give all ranks the same input"
_STEPS_DIFFER = "the denoising steps, timestep or guidance differ on rank(s) {}; give all ranks the same"
_LENGTHS_DIFFER = "the text or another condition differs in length on rank(s) {}; give all ranks the same prompt"
_ARGUMENTS_DIFFER = "the transformer's arguments {names} differ on rank(s) {{}}; give all ranks the same"
_LATENTS_DIFFER = (
    "the latents that a generation begins with differ on rank(s) {}; give all ranks the same seed, or leave "
    "generator= out of calls of the pipeline that db-SP was enabled on"
)
_CONDITION_DIFFERS = (
    "the text or another condition differs on rank(s) {{}} ({name}); give all ranks the same prompt, images and "
    "guidance"
)
_LATENTS_DRIFT = (
    "the latents differ on rank(s) {} within a generation; every pass has computed with rank 0's. Draw noise, in "
    "callbacks and loops too, from torch's generators with the same seed on all ranks"
)
_CONDITION_DRIFTS = (
    "the timestep, text or another condition differs on rank(s) {{}} within a generation ({name}); every pass has "
    "computed with rank 0's. Change the transformer's inputs equally on all ranks"
)

BEGIN = 2  # number of passes at the beginning of a generation (with guidance, those of its first step)


@dataclass(frozen=True)
class Pass:
    """A forward pass that has begun on this rank."""

    arguments: Arguments  # this rank's arguments
    sample: Any  # latents, a tensor or a list
    latents: dict[str, torch.Tensor]  # tensors of the sample, by name
    conditions: dict[str, torch.Tensor]  # all other tensors, by name
    plain: dict[str, Any]  # arguments that are not tensors, by name
    generation: int  # number of the generation on this rank
    number: int  # number of the pass in its generation
    step_index: int | None  # the scheduler's, within a pipeline call
    is_new: bool  # True if ranks have not compared such a pass in this generation, or the last pass failed
    keeps_inputs: bool  # True if each rank uses its own inputs, as in training

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
        """Error message of each tensor if it differs between ranks."""
        begins = self.number < BEGIN
        latents, condition = (_LATENTS_DIFFER, _CONDITION_DIFFERS) if begins else (_LATENTS_DRIFT, _CONDITION_DRIFTS)
        return [latents] * len(self.latents) + [condition.format(name=name) for name in self.conditions]

    @property
    def device(self) -> torch.device:
        """The GPU of the tensors, if any is on one."""
        devices = [tensor.device for tensor in self.tensors]
        return next((device for device in devices if device.type != "cpu"), torch.device("cpu"))

    @property
    def description(self) -> object:
        """Everything but the values of tensors, for comparison by `repr`."""
        return self.number, self.step_index, sorted(self.plain.items()), kinds_of(self.latents | self.conditions)

    def fingerprints(self, *of_generation: object) -> dict[str, int]:
        """Returns fingerprints of everything but tensor values, and of `of_generation`, by error message."""
        plain = {name: value for name, value in self.plain.items() if name != "return_dict"}
        described = {
            _SIZES_DIFFER: kinds_of(self.latents),
            _STEPS_DIFFER: (self.number, of_generation),
            _LENGTHS_DIFFER: kinds_of(self.conditions),
            _ARGUMENTS_DIFFER.format(names=", ".join(plain) or "that are not tensors"): sorted(plain.items()),
        }
        return {message: fingerprint_of(value) for message, value in described.items()}


def named_tensors(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Returns the non-empty tensors of a pass's arguments by name, including those in lists and mappings."""
    return {
        f"{name}{keystr(path)}": leaf
        for name, value in inputs.items()
        for path, leaf in tree_flatten_with_path(value)[0]
        if isinstance(leaf, torch.Tensor) and leaf.numel() and leaf.layout == torch.strided
        if not hasattr(leaf, "device_mesh")
    }


def plain_values(value: Any) -> Any:
    """Returns comparable values of a non-tensor argument: numbers, strings, and type names of other objects."""
    plain = (bool, int, float, str, type(None), torch.dtype)
    return tree_map(lambda leaf: leaf if isinstance(leaf, plain) else type(leaf).__name__, value)


def kinds_of(tensors: Mapping[str, torch.Tensor]) -> tuple[object, ...]:
    """Returns name, shape, dtype and device type of tensors, which must be equal on all ranks."""
    return tuple((name, tuple(tensor.shape), tensor.dtype, tensor.device.type) for name, tensor in tensors.items())


def substitute(substitutes: Readings, tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns a tensor with these values, from the second pass on the same object until `tensor` is written to.

    So cached readings (`read_once`) work for substitutes of tensors that a pipeline passes in every step, such as text
    embeddings.
    """
    known = substitutes.kept_for(tensor)
    if not known:
        known["substitute"] = None
        return values
    if known["substitute"] is None:
        known["substitute"] = values.clone()
    else:
        known["substitute"].data.copy_(values)  # does not change the version, since values are equal
    return known["substitute"]


Items = tuple[int, ...]  # positions of items in a batch, ascending

_parts = Readings()  # parts of integer tensors by items, cached so that readings of parts are cached, too


def parts_by_size(sizes: Sequence[Hashable]) -> list[Items]:
    """Returns the items of each size, in order of first appearance."""
    items_by_size: dict[Hashable, list[int]] = {}
    for item, size in enumerate(sizes):
        items_by_size.setdefault(size, []).append(item)
    return [tuple(items) for items in items_by_size.values()]


def part_of(inputs: Mapping[str, Any], items: Items, batch: int) -> dict[str, Any]:
    """Returns a pass's arguments with some items of tensors [batch, …] and lists of length `batch`."""

    def taken(value: Any) -> Any:
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

    return {name: taken(value) for name, value in inputs.items()}


def join_parts(outputs: Sequence[Any], parts: Sequence[Items]) -> Any:
    """Joins the outputs of parts of a batch: tensors [items, …], lists, or tuples or mappings of these."""
    first = outputs[0]
    if isinstance(first, Mapping):
        return type(first)(**{name: join_parts([output[name] for output in outputs], parts) for name in first})
    if isinstance(first, tuple):
        return tuple(join_parts(elements, parts) for elements in zip(*outputs, strict=True))
    position = {item: (part, index) for part, items in enumerate(parts) for index, item in enumerate(items)}
    by_item = [outputs[part][index] for part, index in (position[item] for item in sorted(position))]
    return torch.stack(by_item) if isinstance(first, torch.Tensor) else by_item


def _rows(value: torch.Tensor, items: Items) -> torch.Tensor:
    """Returns some rows, as a view if they are adjacent or equal."""
    if value.stride(0) == 0:
        return value[: len(items)]
    if items[-1] - items[0] == len(items) - 1:
        return value[items[0] : items[-1] + 1]
    return torch.cat([value[item : item + 1] for item in items])
