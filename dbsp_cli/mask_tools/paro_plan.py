"""Reads what other projects' files say about heads: token orders, which are empty, and how they were reordered."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from dbsp_cli.mask_tools.foreign_files import SUFFIXES, read_arrays
from dbsp_core.masks.mask_file import Orders, one_or_each
from dbsp_core.masks.token_order import CANONICAL, require_order
from dbsp_core.utils.errors import UserError

__all__ = ["PARO_ORDERS", "empty_heads", "head_permutations", "is_file", "token_orders"]

PARO_ORDERS = ("thw", "twh", "hwt", "htw", "wht", "wth")
"""PAROAttention's numbering of token orders, in its `permute_plan['permute']`."""


def is_file(text: str | None) -> bool:
    """True for the path of a file with arrays, by its suffix."""
    return text is not None and Path(text).suffix in SUFFIXES


def token_orders(given: str | None, stored: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> tuple[Orders, ...]:
    """Returns the token orders of each mask, or one for all masks.

    Args:
        given: Orders in words, separated by commas, or the path of a file with indices into PARO_ORDERS.
        stored: The other tensors in the masks' file; its 'permute' is used where nothing is given.
        shape: Shape of the masks, […, H, nq, nk].

    Raises:
        UserError: There is no such order, or the orders don't fit the masks.
    """
    if given is not None and not is_file(given):
        names = [name.strip() for name in given.split(",")]
        for name in names:
            require_order(name)
        if len(names) not in (1, shape[-3]):
            raise UserError(f"--orders names {len(names)} token orders, the masks have {shape[-3]} heads")
        return (one_or_each(names),)
    if given is None and "permute" not in stored:
        return ((CANONICAL,),)
    table = by_mask(_one_of(given, stored, "permute", "token orders"), shape, "token orders")
    if int(table.min()) < 0 or int(table.max()) >= len(PARO_ORDERS):
        raise UserError(f"token orders must be 0 to 5 ({', '.join(PARO_ORDERS)}), found {int(table.max())}")
    return tuple(one_or_each([PARO_ORDERS[number] for number in row]) for row in table.long().tolist())


def empty_heads(given: str | None, stored: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
    """bool[masks, H]: heads that a permute plan calls empty, in the file `given` or in the masks' own file."""
    plan = read_arrays(given) if given is not None and is_file(given) else stored
    if "empty" not in plan:
        raise UserError("--skip-empty needs a permute plan with a tensor 'empty'; name its file with --orders")
    return by_mask(plan["empty"], shape, "empty heads").bool()


def head_permutations(given: str, shape: tuple[int, ...]) -> torch.Tensor:
    """int64[masks, H]: the head that is at each place of the stored masks, from the file `given`.

    Raises:
        UserError: It is no permutation of the heads.
    """
    table = by_mask(_one_of(given, {}, "perm_idx", "a permutation of heads"), shape, "permutations of heads").long()
    if not torch.equal(table.sort(dim=1).values, torch.arange(shape[-3], device="cpu").expand(table.shape)):
        raise UserError(f"{given}: each row must hold every head from 0 to {shape[-3] - 1} once")
    return table


def by_mask(table: torch.Tensor, shape: tuple[int, ...], what: str) -> torch.Tensor:
    """Expands [H], [L, H] or [S, L, H] to [masks, H]."""
    leading = tuple(shape[:-2])
    if table.ndim == 0 or tuple(table.shape) != leading[len(leading) - table.ndim :]:
        raise UserError(f"{what} of shape {list(table.shape)} do not fit masks of shape {list(shape)}")
    return table.expand(leading).reshape(-1, leading[-1])


def _one_of(given: str | None, stored: Mapping[str, torch.Tensor], name: str, what: str) -> torch.Tensor:
    """Returns the tensor of that name, or the only one, in the file `given`, else in the masks' own file."""
    arrays = stored if given is None else read_arrays(given)
    if name in arrays:
        return arrays[name]
    if len(arrays) == 1:
        return next(iter(arrays.values()))
    raise UserError(f"{given} has no tensor {name!r} with {what} (it has {', '.join(arrays)})")
