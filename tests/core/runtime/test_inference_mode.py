"""What a session keeps from a pass under torch.inference_mode() serves training, too."""

from __future__ import annotations

import pytest

from tests.core.runtime.check_cases import WINDOW, kept_from_inference

SPARGE = {"source": "sparge", "cdf": 0.6, "block_q": 16, "block_k": 16}


@pytest.mark.parametrize("strategy", ["U2R1", "U1R2"])
@pytest.mark.parametrize(
    ("settings", "debug"),
    [({"mask": WINDOW}, ""), ({"mask": SPARGE}, ""), ({"mask": SPARGE}, "1")],
    ids=["window", "sparge", "debug"],
)
def test_nothing_kept_from_a_pass_in_inference_mode_is_rejected_by_autograd(
    pool, monkeypatch, settings, debug, strategy
):
    monkeypatch.setenv("DBSP_DEBUG", debug)
    for kept, rejected, apart, gradients in pool(2).run(kept_from_inference, settings, strategy):
        assert kept > 10
        assert rejected == 0
        assert apart <= 1e-5
        assert gradients
