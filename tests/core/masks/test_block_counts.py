"""Counting a mask's blocks, on the host and where the bits are."""

from __future__ import annotations

import numpy as np
import torch

from dbsp_core.masks.mask_counts import MaskCounts, _columns_on_device


def test_columns_by_rank_are_counted_identically_by_numpy_and_on_a_device():
    draws = np.random.default_rng(0)
    parts = [torch.from_numpy(draws.random((3, rows, columns)) < 0.1) for rows, columns in ((40, 30), (300, 7))]
    owner, counts = draws.integers(0, 5, (3, 340)), MaskCounts(*parts)
    owners = torch.from_numpy(owner).split([40, 300], dim=1)
    by_rank = torch.cat([_columns_on_device(*one, 5) for one in zip(parts, owners, strict=True)], dim=2)
    assert np.array_equal(by_rank.numpy(), counts.columns_by_rank(owner, 5))
    assert by_rank.sum() == sum(int(part.sum()) for part in parts)


def test_columns_are_remembered_for_the_last_owners_only():
    draws = np.random.default_rng(0)
    bits = torch.from_numpy(draws.random((3, 40, 30)) < 0.4)
    owner, others = (draws.integers(0, 3, (3, 40)) for _ in range(2))
    counts = MaskCounts(bits)
    expected = counts.columns_by_rank(owner, 3)
    assert counts.columns_by_rank(owner, 3) is expected
    counts.columns_by_rank(others, 3)
    assert np.array_equal(counts.columns_by_rank(owner, 3), expected)
