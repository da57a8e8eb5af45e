"""Absent keys, of known score and zero value: one more column of scores; see test_drawn_attentions.py, too."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from dbsp_core import (
    BlockGrid,
    BlockMask,
    DualBalancedAttention,
    SequenceGroup,
    SequenceLayout,
    make_plan,
)
from dbsp_core.runtime.prepared import AbsentKeys
from dbsp_core.utils.errors import UserError
from tests.support.attention_cases import Case, Inputs, absent_keys, as_sent, attend, whole
from tests.support.oracle import dense_attention, largest_difference

ABSENT = Case("-", heads=5, tokens=331, block_q=32, text_tokens=37, batch=2, absent=True)


def error_in_int8(rank: int, world: int) -> float:
    case = replace(ABSENT, strategy="U2R2", precision="int8", padded=True)
    given = Inputs.from_case(case, rank)
    out = attend(case, given.mask, given.layout, given.local)[:, :, given.slots]
    q, k, v = as_sent(case, given.full)
    return largest_difference(out, dense_attention(q[:, :, given.mine], k, v, given.mask, given.mine))


def test_attention_in_int8_equals_one_process(threads):
    """The score of an absent key is not less by the mean of keys, as others are."""
    assert max(threads(4).run(error_in_int8)) <= 1e-5


@pytest.mark.parametrize(
    ("out", "lse", "absent", "expected", "expected_lse"),
    [
        ((0.5, -1.0), 2.0, math.log(3), (0.3556, -0.7112), 2.34075),  # three zero-padded slots
        ((1.0, -2.0), 1.5, 0.25, (0.7773, -1.5546), 1.751929),  # a sink
        ((1.0, -2.0), 1.5, -math.inf, (1.0, -2.0), 1.5),
        ((0.0, 0.0), -math.inf, -math.inf, (0.0, 0.0), -math.inf),
        ((0.0, 0.0), -math.inf, 1.0, (0.0, 0.0), 1.0),
    ],
)
def test_the_rule_in_numbers(out, lse, absent, expected, expected_lse):
    keys = AbsentKeys(torch.tensor([absent]), torch.tensor([0]))
    result = torch.tensor([[out]]), torch.tensor([[lse]])  # [B·Rq, Bq, D], [B·Rq, Bq]
    changed, changed_lse = keys.added_to(result, torch.zeros(1, 1, 2), 1, 1.0, None)
    assert changed[0, 0].tolist() == pytest.approx(expected, abs=1e-4)
    assert max(float(changed_lse), -1e30) == pytest.approx(max(expected_lse, -1e30), abs=1e-5)


def test_masks_differ_by_their_absent_keys():
    grid = BlockGrid.uniform(100, 16)
    bits = torch.ones(2, grid.nq, grid.nk, dtype=torch.bool)
    masks = [BlockMask(bits, grid, absent=absent_keys(2, grid, seed)) for seed in (0, 0, 1)]
    assert masks[0].fingerprint == masks[1].fingerprint != masks[2].fingerprint
    with pytest.raises(UserError, match=r"absent keys are torch.float32 of shape \(3, 7\); expected .* \(2, 7\)"):
        replace(masks[0], absent=absent_keys(3, grid, 0))


def test_kernels_without_a_log_sum_exp_are_rejected():
    mask, _ = whole(ABSENT)
    with pytest.raises(UserError, match="kernel 'sparge'"):
        DualBalancedAttention.prepare(
            make_plan(mask, "U1R1"), mask, SequenceLayout.contiguous(331, 1), SequenceGroup(0, 1), kernel="sparge"
        )
