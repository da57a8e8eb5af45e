"""dbsp_para: mistakes are rejected on every rank, and leave no trace; what stock ParaAttention gets wrong."""

from __future__ import annotations

import pytest

from tests.para.para_bad_input_cases import MISTAKES, run_mistake, run_stock

pytest.importorskip("para_attn")


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_rejected_on_every_rank_without_a_trace(pool, name):
    expected = MISTAKES[name][1]
    for message, left in pool(2).run(run_mistake, name):
        kind = "ValueError" if name == "a failure half-way" else "UserError"
        assert message.startswith(f"{kind}: "), message
        assert expected in message, message
        assert "\n" not in message
        assert not left


def test_stock_para_attn_fails_on_wan(pool):
    """Of docs/paraattention.md. When this fails, para-attn has been corrected: say so there."""
    assert all("'tuple' object has no attribute 'shape'" in str(r) for r in pool(2).run(run_stock, "wan", 2))


def test_stock_para_attn_is_wrong_on_cogvideox_1_5(pool):
    """Of docs/paraattention.md. CogVideoX 1.0 shows that the comparison is a fair one."""
    assert all(r <= 1e-5 for r in pool(2).run(run_stock, "cogvideox1.0", 3))
    assert all(r > 0.1 for r in pool(2).run(run_stock, "cogvideox", 3))
