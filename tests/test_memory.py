"""An attention's peak memory, counted: what is packed, sent and received is let go as soon as it is not needed."""

from __future__ import annotations

import pytest

from dbsp_core import Strategy
from memory_cases import peak_of_an_attention


@pytest.mark.parametrize(
    ("strategy", "tensors"),
    [
        ("U4R1", 6),  # q, k, v as they came, and packed
        ("U8R1", 6),
        ("U2R2", 6),
        ("U1R4", 8),  # packed q, the first slot, the slot in use, the one that comes, and the output
    ],
)
def test_the_peak_beside_the_inputs(strategy, tensors):
    parsed = Strategy.parse(strategy)
    for rank in range(parsed.world):
        peak = peak_of_an_attention(rank, parsed)
        assert tensors <= peak <= tensors + 0.1  # log-sum-exps, and a token more here than there
