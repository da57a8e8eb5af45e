"""The tokens of a forward pass, from its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from dbsp_core.masks.grid import CANONICAL, Video
from dbsp_core.sources import DenseSource, LowRankSource, MaskSource, RecordQKSource, SolSource, SpargeSource, parts_of
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.process import outside_inference

Inputs = Mapping[str, Any]  # arguments of a forward pass by name

Value = TypeVar("Value")
TEXTS_DIFFER = "the texts of one batch differ in length"
_SEPARATELY = "call the transformer with items of one kind at a time"
_PLACELESS = (DenseSource, LowRankSource, RecordQKSource, SolSource, SpargeSource)
"""Sources whose masks do not depend on token positions, unless their token order does."""


@dataclass(frozen=True)
class TokenSequence:
    """Tokens of self-attention in one forward pass."""

    thw: tuple[int, int, int]  # frames, rows and columns of the video's token grid; an image has one frame
    text: int = 0  # number of text tokens without padding; 0 if text is not in the sequence
    timestep: torch.Tensor | float | None = None  # of the denoising, falling from step to step; None if unknown
    packed: torch.Tensor | None = None
    """int64[tokens], slot of each token in the model's packed sequence, text (everything but video) first; None: text
    and video are separate streams."""
    packed_length: int | None = None  # number of slots of the packed sequence, if some are padding
    no_grid: str | None = None  # why tokens are not a grid; thw is then (1, 1, tokens), for masks without positions

    @classmethod
    def on_grid(cls, thw: tuple[int, int, int] | None, tokens: int, what: str, **others: Any) -> TokenSequence:
        """Returns tokens on grid `thw`, or without a grid if None; `what` names the model's input for messages."""
        if thw is not None:
            return cls(thw, **others)
        reason = f"{what} is not one grid of tokens: it has tokens besides the generated ones (references, edits)"
        return cls((1, 1, tokens), no_grid=reason, **others)

    def require_grid(self, source: MaskSource) -> None:
        """Raises UserError if a source's masks need positions but the tokens do not form a grid."""
        placeless = (
            isinstance(part, _PLACELESS) and getattr(part, "token_order", CANONICAL) == CANONICAL
            for part in parts_of(source)
        )
        if self.no_grid is not None and not all(placeless):
            raise UserError(
                f"{self.no_grid}; use a mask without positions: dense, or sparge, sol or lowrank in order thw"
            )

    @property
    def video(self) -> Video:
        return Video(self.thw, self.text)


def sample_grid(transformer: Any, inputs: Inputs, frames_dim: int = 2) -> tuple[int, int, int]:
    """Returns (t, h, w) of a sample by the configured patch size.

    The sample is [B, C, F, H, W], [B, F, C, H, W] with frames_dim 1, or an image [B, C, H, W].
    """
    sample: torch.Tensor = inputs["hidden_states"]
    config = getattr(transformer, "config", transformer)  # other libraries store sizes as attributes
    patch = config.patch_size
    if isinstance(patch, int):
        patch = (getattr(config, "patch_size_t", None) or 1, patch, patch)
    if sample.ndim == 4:
        sample, patch = sample.unsqueeze(frames_dim), (1, *patch[-2:])
    frames, height, width = sample.shape[frames_dim], *sample.shape[3:]
    return frames // patch[0], height // patch[1], width // patch[2]


def on_sample_grid(
    text: Callable[[Inputs], int] = lambda inputs: 0,
    grid: Callable[[Any, Inputs], tuple[int, int, int]] = sample_grid,
    rejects: tuple[str, ...] = (),
) -> Callable[[Any, Inputs], TokenSequence]:
    """Makes an architecture's `sequence` for tokens on the grid of the sample.

    `text` returns the number of text tokens without padding, `grid` (t, h, w); `rejects` are unsupported arguments.
    """

    def sequence(transformer: Any, inputs: Inputs) -> TokenSequence:
        reject_arguments(inputs, *rejects)
        return TokenSequence(grid(transformer, inputs), text(inputs), timestep_of(inputs))

    return sequence


def text_length(inputs: Inputs) -> int:
    return inputs["encoder_hidden_states"].shape[1]


def text_before_padding(inputs: Inputs) -> int:
    return valid_tokens(inputs["encoder_attention_mask"])


def valid_tokens(mask: torch.Tensor) -> int:
    """Returns the number of text tokens in a mask [B, n].

    Raises UserError unless they come first, and equally many in each batch item.
    """

    def count(mask: torch.Tensor) -> int:
        rows = mask.bool().cpu()
        valid = int(rows[0].sum())
        if not (rows[:, :valid].all() and not rows[:, valid:].any()):
            raise UserError(f"{TEXTS_DIFFER}, or have padding before their end; {_SEPARATELY}")
        return valid

    return read_once(mask, count)


def valid_slots(mask: torch.Tensor) -> torch.Tensor:
    """Returns the slots of text tokens in a mask [B, n], int64. Raises UserError if batch items differ."""

    def slots(mask: torch.Tensor) -> torch.Tensor:
        rows = mask.bool().cpu()
        if not (rows == rows[:1]).all():
            raise UserError(f"{TEXTS_DIFFER}; {_SEPARATELY}")
        return rows[0].nonzero().squeeze(1)

    return read_once(mask, slots)


def position_grid(positions: torch.Tensor, tokens: int) -> tuple[int, int, int] | None:
    """Returns (t, h, w) of tokens at positions [tokens, 3 or more] (t, h, w first), or None if they are not a grid."""
    rows = positions[:, :3].cpu()
    frame = _run(rows[:, 0])
    width = _run(rows[:frame, 1])
    if len(rows) == tokens and len(rows) % frame == 0 and frame % width == 0:
        frames, by_row = rows.unflatten(0, (-1, frame)), rows[:frame].unflatten(0, (-1, width))
        times = (frames[:, :, 0] == frames[:, :1, 0]).all() and (frames[:, :, 1:] == frames[:1, :, 1:]).all()
        if times and (by_row[:, :, 1] == by_row[:, :1, 1]).all() and (by_row[:, :, 2] == by_row[:1, :, 2]).all():
            return len(frames), frame // width, width
    return None


def one_for_all(values: Iterable[Value], difference: str) -> Value:
    """Returns the common value of all batch items. Raises UserError with `difference` if they differ."""
    first, *others = set(values)
    if others:
        raise UserError(f"{difference}; {_SEPARATELY}")
    return first


def _run(values: torch.Tensor) -> int:
    """Returns the length of the first run of equal values."""
    others = (values != values[0]).nonzero()
    return len(values) if len(others) == 0 else int(others[0])


class Readings:
    """Cache of values read from tensors, valid until a tensor is freed or written to.

    Pipelines pass the same tensors at each step, and reading them synchronizes with the device.
    """

    def __init__(self) -> None:
        self._of_version: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def kept_for(self, tensor: torch.Tensor) -> dict[Any, Any]:
        """Returns the cache of a tensor, mutable; inference tensors do not track writes and are not cached."""
        if tensor.is_inference():
            return {}
        version, readings = self._of_version.get(tensor, (None, {}))
        if version != tensor._version:
            readings = {}
            self._of_version[tensor] = tensor._version, readings
        return readings


_readings = Readings()


def read_once(tensor: torch.Tensor, function: Callable[[torch.Tensor], Value]) -> Value:
    """Calls function(tensor), cached by the function's qualified name until the tensor is written to."""
    readings, key = _readings.kept_for(tensor), function.__qualname__
    if key not in readings:
        readings[key] = outside_inference(function)(tensor)
    return readings[key]


def timestep_of(inputs: Inputs) -> torch.Tensor | float | None:
    """Returns the largest timestep of the tokens (known tokens, such as a first frame, are at 0).

    A timestep common to all items and tokens is returned as a view, so that a whole schedule is read at once.
    """
    timestep = inputs.get("timestep")
    if not isinstance(timestep, torch.Tensor):
        return timestep
    if all(size == 1 or stride == 0 for size, stride in zip(timestep.shape, timestep.stride(), strict=True)):
        return timestep[(0,) * timestep.ndim].reshape(1)
    return timestep.amax().reshape(1)


def reject_arguments(inputs: Inputs, *names: str) -> None:
    """Raises UserError if one of these arguments is set, which db-SP does not shard."""
    for name in names:
        if not (inputs.get(name) is None or inputs[name] is False):
            raise UserError(f"db-SP does not support this model with {name}; remove it, or call `disable`")
