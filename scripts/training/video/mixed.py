"""Images and videos of several sizes in one step: each data loader has its own, and its rank the loss of these."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from dbsp_core.utils.errors import UserError
from dbsp_diffusers import PackedSample, packed_forward_local
from scripts.training.video.clips import Clips, Item

__all__ = ["Mix", "Size", "cut_item", "local_loss", "sample_of"]

Size = tuple[int, int, int]
"""Frames, rows and columns of latents."""
_SIZE = re.compile(r"(?:(\d+)\*)?(\d+)x(\d+)x(\d+)")


@dataclass(frozen=True)
class Mix:
    """What data loaders give in a step: in the next, each gives what the one after it gave.

    loaders: by loader, the sizes of its samples, maybe none
    """

    loaders: tuple[tuple[Size, ...], ...]

    @classmethod
    def parse(cls, text: str, largest: Size | None = None) -> Mix:
        """Reads "33x144x240,4*1x144x240,none": of each loader, count and frames x height x width in pixels.

        largest: of the encoded clips, in pixels, which others are cut from. Raises UserError for what cannot be cut.
        """
        loaders = []
        for entry in text.split(","):
            sizes: list[Size] = []
            for part in filter(lambda part: part != "none", entry.split("+")):
                found = _SIZE.fullmatch(part)
                if found is None:
                    raise UserError(f"--mix {part!r} must be COUNT*FRAMESxHEIGHTxWIDTH or none, joined by + and ,")
                frames, height, width = (int(number) for number in found.groups()[1:])
                if frames % 4 != 1 or height % 16 or width % 16 or not all((frames, height, width)):
                    raise UserError(f"--mix {part}: frames must be 4n + 1, height and width multiples of 16")
                if largest and any(a > b for a, b in zip((frames, height, width), largest, strict=True)):
                    clips = "x".join(map(str, largest))
                    raise UserError(f"--mix {part} is larger than the clips, {clips}; give larger --frames, --height…")
                sizes += [(frames // 4 + 1, height // 8, width // 8)] * int(found[1] or 1)
            loaders.append(tuple(sizes))
        if not any(loaders):
            raise UserError("--mix has no samples; give at least one loader some")
        return cls(tuple(loaders))

    def require_groups(self, ranks: int, groups: int) -> None:
        """Raises UserError where a data-parallel group of ranks has no sample in some step."""
        for step in range(len(self.loaders)):
            busy = {rank * groups // ranks for rank, _, _ in self.step(step, ranks)}
            if len(busy) < groups:
                raise UserError(f"--mix leaves a data-parallel group of {groups} without samples; give fewer groups")

    def step(self, step: int, ranks: int) -> list[tuple[int, int, Size]]:
        """(rank, number in the run, size) of each sample of a step: the same samples on any number of ranks."""
        count = len(self.loaders)
        given = [(loader % ranks, size) for loader in range(count) for size in self.loaders[(loader + step) % count]]
        return [(rank, step * len(given) + place, size) for place, (rank, size) in enumerate(given)]


def cut_item(clips: Clips, number: int, size: Size) -> Item:
    """The run's item `number`: the first frames of a clip, and the middle of them. One frame is an image."""
    item = clips.item(number)
    frames, height, width = size
    top, left = ((whole - part) // 2 for whole, part in zip(item.latents.shape[2:], size[1:], strict=True))
    here = (slice(None), slice(frames), slice(top, top + height), slice(left, left + width))
    return replace(item, latents=item.latents[here], noise=item.noise[here])


def sample_of(item: Item, device: torch.device) -> PackedSample:
    """What the transformer is given: latents mixed with noise."""
    mixed = torch.lerp(item.latents, item.noise, item.level).to(device)
    return PackedSample(mixed, torch.tensor(item.level * 1000, device=device), item.text.to(device))


def local_loss(
    model: Any,
    clips: Clips,
    given: Sequence[tuple[int, int, Size]],
    rank: int,
    device: torch.device,
    bags: Mapping[str, Any] | None = None,
) -> torch.Tensor:
    """This rank's part of the step's mean squared error of the velocity: that of its own samples. Collective.

    given: (rank, number in the run, size) of all samples of the step
    bags: as `packed_forward_local` has them
    """
    items = [cut_item(clips, number, size) for owner, number, size in given if owner == rank]
    values = sum(math.prod(size) for _, _, size in given) * clips.channels
    predictions = packed_forward_local(model, [sample_of(item, device) for item in items], bags=bags)
    parts = [
        F.mse_loss(found.float(), (item.noise - item.latents).to(device), reduction="sum")
        for found, item in zip(predictions.samples, items, strict=True)
    ]
    return sum(parts, predictions.zero.float()) / values
