"""Converts masks of other projects, and recordings, to mask files."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from dbsp_cli.mask_tools.foreign_files import SUFFIXES, ForeignBlocks, read_tensors, stacked
from dbsp_cli.mask_tools.recording import Recording
from dbsp_core.masks.grid import CANONICAL, BlockGrid, require_order
from dbsp_core.masks.mask_file import MaskFile, MaskLayout, Orders, mask_file_bytes, one_or_each
from dbsp_core.masks.steps import DenoisingStep, StepGroups
from dbsp_core.utils.errors import UserError, cut_short, in_short
from dbsp_core.utils.files import write_atomically
from dbsp_core.utils.schema import build, setting_names
from dbsp_core.utils.yaml_file import parse_value

Options = TypeVar("Options")

PARO_ORDERS = ("thw", "twh", "hwt", "htw", "wht", "wth")
"""Token orders by PAROAttention's number in `permute_plan['permute']`."""
ENCODINGS = ("absolute", "delta")
"""Lists of key blocks by index ("absolute"), or by the distance to the previous block ("delta"), as in SpargeAttn's
kernels and the official db-SP scripts."""
_MASKS = ("mask", "sparse", "masks", "lut")
_COUNTS = ("counts", "count", "valid_block_num")


def lut_bits(lut: torch.Tensor, counts: torch.Tensor | None, encoding: str, nk: int) -> torch.Tensor:
    """Converts integer lists of key blocks [H, nq, width] with counts int[H, nq] of valid ones to bool[H, nq, nk].

    Without counts, all entries with 0 ≤ block < nk are valid, which handles padding with −1, nk or (delta) zeros; only
    an empty row of zeros looks like block 0.
    """
    if lut.dtype.is_floating_point or lut.dtype == torch.bool:
        raise UserError(f"lists of blocks must be integers, got {lut.dtype}")
    width = lut.shape[-1]
    blocks = lut.long()
    if counts is not None:
        if int(counts.min()) < 0 or int(counts.max()) > width:
            raise UserError(f"counts must lie between 0 and {width}, got {int(counts.min())} to {int(counts.max())}")
        valid = torch.arange(width, device="cpu") < counts.long()[..., None]
    elif encoding == "delta":
        valid = (blocks < 0).cumsum(dim=-1) == 0
    else:
        valid = blocks >= 0
    blocks = blocks.masked_fill(~valid, 0)
    if encoding == "delta":
        blocks = blocks.cumsum(dim=-1)
    beyond = valid & ((blocks < 0) | (blocks >= nk))
    if counts is not None and bool(beyond.any()):
        other = "absolute" if encoding == "delta" else "delta"
        raise UserError(
            f"the lists contain block {int(blocks[beyond][0])}, but there are {nk} key blocks; try lut={other} "
            f"(lists may be {other}), or correct tokens or block_k"
        )
    bits = torch.zeros(*lut.shape[:-1], nk + 1, dtype=torch.bool, device="cpu")
    bits.scatter_(-1, torch.where(valid & ~beyond, blocks, nk), True)
    return bits[..., :nk]


def parse_thw(text: str) -> tuple[int, int, int]:
    """Parses "21,45,80" or "21x45x80". Raises UserError for other text."""
    parts = text.replace("x", ",").split(",")
    if len(parts) != 3 or not all(re.fullmatch(r"\s*\d{1,9}\s*", part, re.ASCII) and int(part) > 0 for part in parts):
        raise UserError(f"thw={text} is not of the form T,H,W, such as thw=21,45,80")
    frames, rows, columns = map(int, parts)
    return frames, rows, columns


@dataclass(frozen=True)
class ConvertOptions:
    """Options for reading a file. Raises UserError for contradicting options."""

    key: str | None = None  # name of the tensor of masks. None: a usual name, or the only tensor
    tokens: int | None = None  # text and video tokens; not needed with `thw`
    thw: tuple[int, int, int] | None = field(
        default=None, metadata={"read": lambda value, _: None if value is None else parse_thw(str(value))}
    )
    text_tokens: int = 0
    block_q: int = 64
    block_k: int = 64
    orders: str | None = None
    """A token order, a comma-separated list with one per head, or a file with indices [L, H] or [H] into PARO_ORDERS,
    like 'permute' in PAROAttention's permute plans."""
    groups: str | None = None  # step groups, such as "5-9,10-24,25-49"
    steps: int | None = None  # denoising steps, divided equally over the file's groups, as in PAROAttention
    lut: str | None = None  # "absolute" or "delta" if the tensor lists each row's key blocks
    counts: str | None = None  # name of the tensor with the lengths of these lists
    joined_text: bool | None = None  # True if blocks continue from text into video; None: whichever fits
    tail_dense: bool | None = None  # True: last row and column dense, as in PAROAttention; None: in its sparse plans

    def __post_init__(self) -> None:
        if self.tokens is None and self.thw is None:
            raise UserError(
                "the file does not say how many tokens there are; give thw=T,H,W in tokens (with text_tokens=N), "
                "or tokens=N"
            )
        if self.groups is not None and self.steps is not None:
            raise UserError("groups and steps both set the step groups; remove one of them")
        if self.lut is not None and self.lut not in ENCODINGS:
            raise UserError(f"unknown lut encoding {self.lut!r}; use one of {', '.join(ENCODINGS)}")

    @property
    def grid(self) -> BlockGrid:
        """The grid of the mask file, without token orders."""
        tokens = self.text_tokens + math.prod(self.thw or ()) if self.tokens is None else self.tokens
        return BlockGrid(tokens, self.text_tokens, self.block_q, self.block_k, self.thw)


def convert_masks(source: Path, target: Path, options: ConvertOptions) -> MaskLayout:
    """Writes a mask file from masks in any form listed in docs/mask-files.md, and returns its layout.

    Raises UserError if something does not fit; the message names an option.
    """
    try:
        MaskFile(source)
    except UserError:
        pass
    else:
        raise UserError(f"{source} is already a mask file; use it directly")  # converting would lose metadata
    # 1. Masks [H, nq, nk], or lists of key blocks [H, nq, width] and their lengths [H, nq]
    tensors, grid = read_tensors(source), options.grid
    lengths_name = options.counts or next((name for name in _COUNTS if name in tensors), None)
    if options.lut and lengths_name is not None and lengths_name not in tensors:
        raise UserError(f"{source} has no tensor {lengths_name!r}; counts can be one of {', '.join(tensors)}")
    counts = tensors[lengths_name] if options.lut and lengths_name is not None else None
    stored, shape, name = _masks({key: t for key, t in tensors.items() if t is not counts}, options, source)
    if counts is not None and counts.shape != shape[:-1]:
        raise UserError(
            f"counts of shape {list(counts.shape)} do not fit lists of shape {list(shape)}: one number a row"
        )
    lengths = None if counts is None else counts.reshape(-1, *shape[-3:-1])
    # 2. Steps, token orders, and the way blocks are counted
    groups, orders = _groups(shape, options), _token_orders(options.orders, tensors, shape)
    blocks = ForeignBlocks.find(shape[-2], None if options.lut else shape[-1], grid, options.joined_text)
    tail_dense = (name == "sparse" and not options.lut) if options.tail_dense is None else options.tail_dense

    # 3. Convert one mask at a time: bool[H, nq, nk]
    def converted() -> Iterator[torch.Tensor]:
        masks = (tensor[index] for tensor in stored for index in np.ndindex(tensor.shape[:-3]))
        for number, mask in enumerate(masks):
            if options.lut is None:
                bits = _as_bits(mask, source)
            else:
                bits = lut_bits(mask, None if lengths is None else lengths[number], options.lut, blocks.shape[1])
            yield blocks.fit(bits, tail_dense)

    layout = MaskLayout(grid, shape[-3], shape[-4] if len(shape) > 3 else None, groups, orders)
    write_atomically(target, mask_file_bytes(layout, converted()))
    return layout


@dataclass(frozen=True)
class RecordingOptions:
    """Selects the pass of a recording to convert."""

    step: int | None = None  # not needed if only one was recorded
    branch: int = 0  # the CFG pass of the step


CONVERT_KEYS = (
    *setting_names(ConvertOptions),
    *(f"{name} of a recording" for name in setting_names(RecordingOptions)),
)
"""Names of the settings of `dbsp masks convert`."""


def read_options(words: Iterable[str], kind: type[Options]) -> Options:
    """Builds options from words KEY=VALUE, with values in YAML. Raises UserError for other words."""
    values: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not value:
            raise UserError(f"{in_short(word)} is not of the form KEY=VALUE; for example thw=21,45,80")
        if key in values:
            raise UserError(f"{key} is given twice; give it once")
        values[key] = parse_value(value, key)
    options: Options = build(kind, values, "the settings of dbsp masks convert")
    return options


def convert_recording(folder: Path, target: Path, options: RecordingOptions) -> MaskLayout:
    """Writes a recorded forward pass as a mask file. Raises UserError if layers are missing or differ in grid."""
    recording = Recording.read(folder)
    steps = sorted({moment.step for moment in recording.passes})
    if options.step is None and len(steps) != 1:
        raise UserError(f"{folder} has steps {steps}; choose one with step=N")
    moment = DenoisingStep(steps[0] if options.step is None else options.step, options.branch)
    sizes = [(mask.grid, mask.heads) for mask in (recording.mask(i, moment) for i in range(recording.layers))]
    grids, heads = {grid.with_orders((CANONICAL,)) for grid, _ in sizes}, {heads for _, heads in sizes}
    for quantity, different in (("block grid", grids), ("number of heads", heads)):
        if len(different) > 1:
            raise UserError(f"{folder}: layers differ in their {quantity} at step {moment.step}; record fewer layers")
    orders = tuple(one_or_each(grid.orders) for grid, _ in sizes)
    layout = MaskLayout(grids.pop(), heads.pop(), recording.layers, orders=orders)
    masks = (recording.mask(i, moment).bits for i in range(recording.layers))
    write_atomically(target, mask_file_bytes(layout, masks))
    return layout


def _masks(
    tensors: Mapping[str, torch.Tensor], options: ConvertOptions, source: object
) -> tuple[list[torch.Tensor], tuple[int, ...], str | None]:
    """Returns the tensors of masks, the shape of all, [layers, …] or [groups, layers, …], and their name.

    Without a single tensor of masks, joins the layers' tensors of the list or mapping `key`, or all large tensors.
    """
    large = {name: tensor for name, tensor in tensors.items() if len(tensor.shape) >= 3}
    key = options.key or next((key for key in _MASKS if any(name.partition("/")[0] == key for name in large)), None)
    if key is not None and key in tensors:
        large = {key: tensors[key]}
    elif key is not None:
        large = {name: tensor for name, tensor in large.items() if name.startswith(f"{key}/")}
    if options.key and not large:
        raise UserError(f"{source} has no tensor {key!r}; key can be one of {', '.join(tensors)}")
    stack = stacked(large)
    if stack is None:
        shapes = cut_short(", ".join(f"{name or '(unnamed)'} {list(t.shape)}" for name, t in tensors.items()))
        raise UserError(
            f"{source} has no tensor that is clearly the masks ({shapes}); name it with key=NAME, or stack the "
            "masks of all layers: torch.stack(masks)"
        )
    masks, shape = stack
    if len(shape) not in (3, 4, 5) or 0 in shape:
        raise UserError(
            f"{source}: got masks of shape {list(shape)}, expected [heads, rows, columns], [layers, heads, …] or "
            "[groups, layers, heads, …]"
        )
    if len(shape) == 5 and shape[0] == 1 and options.groups is None and options.steps is None:
        shape = shape[1:]
    return masks, shape, key


def _as_bits(mask: torch.Tensor, source: object) -> torch.Tensor:
    """Converts a mask of 0 and 1 of any dtype to bool. Raises UserError for other values."""
    if mask.dtype == torch.bool:
        return mask
    if mask.dtype.is_complex:
        raise UserError(f"{source}: got masks of {mask.dtype}, expected bool, or numbers 0 and 1")
    numbers = mask.double() if mask.dtype.is_floating_point else mask.long()  # 8-bit floats lack comparisons
    bits = numbers == 1
    if not bool((bits | (numbers == 0)).all()):
        raise UserError(
            f"{source}: masks have values other than 0 and 1 (up to {numbers.max().item()}); if they are lists of "
            "blocks, set lut=absolute or lut=delta"
        )
    return bits


def _groups(shape: Sequence[int], options: ConvertOptions) -> StepGroups | None:
    """Returns the step groups of masks of this shape. Raises UserError if they do not fit the options."""
    if len(shape) < 5:
        if options.groups is not None or options.steps is not None:
            raise UserError(f"masks of shape {list(shape)} have no step groups; remove groups and steps")
        return None
    if options.steps is not None:  # as in PAROAttention: step s of n has mask floor(s · groups / n)
        count, steps = shape[0], options.steps
        if not 1 <= count <= steps:
            raise UserError(f"{count} step groups don't fit into {steps} steps")
        return StepGroups(tuple(-(-group * steps // count) for group in range(count)), steps)
    if options.groups is None:
        raise UserError(
            f"masks have {shape[0]} step groups; set steps=50 to divide 50 steps equally, or all groups in full: "
            "groups=5-9,10-24,25-49"
        )
    groups = StepGroups.parse(options.groups)
    if len(groups) != shape[0]:
        raise UserError(f"groups={groups} names {len(groups)} groups, but the masks have {shape[0]}")
    return groups


def _token_orders(orders: str | None, tensors: Mapping[str, torch.Tensor], shape: Sequence[int]) -> tuple[Orders, ...]:
    """Returns the token orders of each mask [H, nq, nk], or one for all, from text or a plan's tensor 'permute'."""
    in_file = orders is not None and Path(orders).suffix in SUFFIXES
    if orders is not None and not in_file:
        names = [name.strip() for name in orders.split(",")]
        for name in names:
            require_order(name)
        if len(names) not in (1, shape[-3]):
            raise UserError(f"orders names {len(names)} token orders, but the masks have {shape[-3]} heads")
        return (one_or_each(names),)
    # 1. Table [H], [L, H] or [S, L, H]
    plan = read_tensors(str(orders)) if in_file else tensors
    if not in_file and "permute" not in plan:
        return ((CANONICAL,),)
    if "permute" not in plan and len(plan) != 1:
        raise UserError(f"{orders} has no tensor 'permute' with token orders (it has {', '.join(plan)})")
    stored = plan.get("permute", next(iter(plan.values())))
    # 2. Broadcast to each mask: [masks, H]
    leading = tuple(shape[:-2])
    if not stored.shape or stored.shape != leading[len(leading) - len(stored.shape) :]:
        raise UserError(f"token orders of shape {list(stored.shape)} do not fit masks of shape {list(shape)}")
    if int(stored.min()) < 0 or int(stored.max()) >= len(PARO_ORDERS):
        raise UserError(f"token orders must be 0 to 5 ({', '.join(PARO_ORDERS)}), got {int(stored.max())}")
    rows = stored.expand(leading).reshape(-1, leading[-1]).long().tolist()
    return tuple(one_or_each([PARO_ORDERS[number] for number in row]) for row in rows)
