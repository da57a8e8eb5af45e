"""Counting a mask's blocks, also by several threads at once: a plan in use is evaluated while another thread plans."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import torch

from dbsp_core.masks.block_mask import MaskCounts


def test_columns_by_rank_are_counted_alike_by_numpy_and_on_a_device():
    draws = np.random.default_rng(0)
    parts = [torch.from_numpy(draws.random((3, rows, columns)) < 0.1) for rows, columns in ((40, 30), (300, 7))]
    owner, counts = draws.integers(0, 5, (3, 340)), MaskCounts(*parts)
    by_rank = counts.columns_by_rank_on_device(torch.from_numpy(owner), 5)
    assert np.array_equal(by_rank.numpy(), counts.columns_by_rank(owner, 5))
    assert by_rank.sum() == sum(int(part.sum()) for part in parts)


def test_columns_remembered_for_other_owners_meanwhile_are_not_returned():
    """Another thread counts for other owners between the comparison of what is remembered and its use."""
    draws = np.random.default_rng(0)
    bits = torch.from_numpy(draws.random((3, 40, 30)) < 0.4)
    owner, others = (draws.integers(0, 3, (3, 40)) for _ in range(2))
    expected, counts = MaskCounts(bits).columns_by_rank(owner, 3), MaskCounts(bits)
    counts.columns_by_rank(owner, 3)

    def compared(one: np.ndarray, other: np.ndarray, equal: Any = np.array_equal) -> bool:
        answer = equal(one, other)
        with mock.patch.object(np, "array_equal", equal):
            counts.columns_by_rank(others, 3)
        return answer

    with mock.patch.object(np, "array_equal", compared):
        found = counts.columns_by_rank(owner, 3)
    assert np.array_equal(found, expected)
