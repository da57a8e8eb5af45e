"""int8 in exchanges: outputs, and gradients, which are rejected; for q, k and v see test_drawn_attentions.py."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch

from dbsp_core import DualBalancedAttention, SequenceGroup, SequenceLayout, make_plan
from dbsp_core.comm.block_pooling import mean_of_tokens
from dbsp_core.planning.comm_dtype import CommDtype
from tests.support.attention_cases import Case, Inputs, as_sent, at_padding
from tests.support.oracle import dense_attention, hadamard, run_of, signs
from tests.support.workers import assert_all_raise


def prepared(rank: int, case: Case, out_as: str) -> tuple[Inputs, DualBalancedAttention]:
    """Returns a rank's inputs and attention with int8 exchanges."""
    given = Inputs.from_case(case, rank)
    plan = make_plan(given.mask, case.strategy, layout=given.layout, keys=case.keys, precision="int8")
    plan = replace(plan, comm_dtype=CommDtype("int8", out_as))
    n_local = given.local[0].shape[2]
    return given, DualBalancedAttention.prepare(plan, given.mask, given.layout, None, n_local=n_local)


def steps_off(rank: int, world: int, case: Case, out_as: str) -> float:
    """Returns how far this rank's outputs are from exact ones, in steps of int8: half a step if rounded once.

    Of both, rotated: the largest difference of a channel over the step of the exact one's token.
    """
    given, attend = prepared(rank, case, out_as)
    out = attend(*given.local)
    assert not at_padding(out, given.slots).any(), "padding must come back as zeros"
    q, k, v = as_sent(case, given.full)
    expected = dense_attention(q[:, :, given.mine], k, v, given.mask, given.mine)
    out, expected = (rotated(tokens) for tokens in (out[:, :, given.slots], expected))
    step = expected.abs().amax(dim=-1, keepdim=True) / 127
    assert out[(step == 0).expand_as(out)].count_nonzero() == 0, "rows without blocks must come back as zeros"
    return float(((out - expected).abs() / step.masked_fill(step == 0, 1)).max()) if out.numel() else 0.0


def rotated(tokens: torch.Tensor) -> torch.Tensor:
    head_dim = tokens.shape[-1]
    return torch.from_numpy(hadamard(tokens.double().numpy() * signs(head_dim)) * run_of(head_dim) ** -0.5)


def rejected_gradients(rank: int, world: int, whose: int | None, out_as: str) -> None:
    """Attends with inputs of all ranks that need gradients, or of one; nothing of q, k and v may be sent."""
    given, attend = prepared(rank, Case(f"U{world}R1", precision="int8"), out_as)
    for tensor in given.local:
        tensor.requires_grad_(whose in (None, rank))
    sent = mock.Mock(side_effect=AssertionError("q, k or v was sent"))
    attend.prepared.route.dispatch_exchanges[0].__dict__["start"] = sent
    attend(*given.local)


OUTPUTS = Case(
    "-", heads=5, tokens=331, block_q=32, block_k=16, text_tokens=37, batch=2, head_dim=24, precision="int8"
)


@pytest.mark.parametrize(("world", "strategy"), [(1, "U1R1"), (2, "U2R1"), (3, "U1R3"), (6, "U2R3")])
def test_output_is_rounded_once_and_rotated_back(threads, world, strategy):
    case = replace(OUTPUTS, strategy=strategy)
    assert 0.4 < max(threads(world).run(steps_off, case, "int8")) <= 0.51
    assert max(threads(world).run(steps_off, case, "model")) < 0.01


@pytest.mark.parametrize(("whose", "out_as"), [(None, "model"), (1, "model"), (1, "int8")])
def test_gradients_are_rejected_on_all_ranks_before_anything_is_sent(threads, whose, out_as):
    assert_all_raise(threads, 2, "precision: int8 does not support gradients", rejected_gradients, whose, out_as)


def test_mean_of_keys_is_rounded_once():
    """Takes a sum whose mean lies halfway between two numbers of float32, which another rounding would leave."""
    mean = -224962936 * 2.0**-32  # 28 bits
    keys = torch.zeros(1, 1, 161, 1)
    keys[0, 0, 0] = 161 * mean
    keys[0, 0, 1] = 161 * mean - keys[0, 0, 0].double()
    assert keys.double().sum() == 161 * mean
    found = mean_of_tokens(keys, SequenceLayout.contiguous(161, 1), SequenceGroup(0, 1))
    assert found.item() == torch.tensor(mean, dtype=torch.float64).float().item()
