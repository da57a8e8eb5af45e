"""An attention's peak memory, counted: what is packed, sent and received is let go as soon as it is not needed."""

from __future__ import annotations

import numpy as np
import pytest

from dbsp_core import BlockGrid, BlockMask, SequenceLayout, Strategy, make_plan
from dbsp_core.comm.exchange import CHUNKS_IN_FLIGHT
from tests.support.attention_peak import peak_of_attention

WITH_CHUNKS = 2 + 2 * CHUNKS_IN_FLIGHT + 2 * (CHUNKS_IN_FLIGHT - 1)
"""Packed q and the output; k and v of each chunk in use or on its way, and of each on its way what is sent for it.
However many chunks there are: those that were used are released."""


@pytest.mark.parametrize(
    ("strategy", "tensors"),
    [
        ("U4R1", 6),  # q, k, v as they came, and packed
        ("U8R1", 6),
        ("U2R2", WITH_CHUNKS),
        ("U1R4", WITH_CHUNKS),
        ("U1R8", WITH_CHUNKS),
    ],
)
def test_the_peak_beside_the_inputs(strategy, tensors):
    parsed = Strategy.parse(strategy)
    mask = BlockMask.dense(8, BlockGrid.uniform(parsed.world * 512, 32))
    layout = SequenceLayout.striped(mask.grid, parsed)
    plan = make_plan(mask, parsed, layout=layout)
    for rank in range(parsed.world):
        peak = peak_of_attention(plan, mask, layout, rank, 64)
        assert tensors <= peak <= tensors + 0.1  # log-sum-exps, and a token more here than there


def test_where_a_rank_has_many_more_rows_queries_go_ahead():
    """One head as dense as the other two together: whoever has those has twice as many rows."""
    bits = np.ones((3, 64, 64), dtype=bool)
    bits[1:, :, ::2] = False
    mask = BlockMask(bits, BlockGrid.uniform(2048, 32))
    layout = SequenceLayout.contiguous(2048, 2)
    plan = make_plan(mask, "U2R1", "paper", layout=layout)
    peaks = sorted(peak_of_attention(plan, mask, layout, rank, 64) for rank in range(2))
    assert peaks[1] == 5 * 4 / 3  # not 6 · 4/3: queries lie there once
