"""Reads numbers of tensors on a device once, where a program asks for them again and again."""

from __future__ import annotations

import torch
from torch.utils.weak import WeakTensorKeyDictionary

__all__ = ["first_value"]

MOST_VALUES = 1 << 16
"""Values of a schedule that are copied to the host, at most."""
_read: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""Each schedule's version and values. A scheduler makes a new one for each generation."""


def first_value(values: torch.Tensor | float) -> float:
    """Returns the first element.

    A view, such as `timesteps[i].expand(batch)`, is looked up in a copy of all that it is a view of. So a schedule is
    read once, and waits for its device once, however many of its elements are asked for. In inference mode tensors do
    not tell what they are views of: there each is read by itself.
    """
    if not isinstance(values, torch.Tensor):
        return float(values)
    base = values if values._base is None else values._base
    place = values.storage_offset() - base.storage_offset()
    plain = base.is_contiguous() and base.dtype == values.dtype and 0 <= place < base.numel() <= MOST_VALUES
    if base.is_inference() or not plain:
        return float(values[(0,) * values.ndim])
    known = _read.get(base)
    if known is None or known[0] != base._version:
        known = base._version, base.flatten().tolist()
        _read[base] = known
    return float(known[1][place])
