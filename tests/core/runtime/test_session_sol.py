"""Sessions with Sol-Attn's predicted masks: exact while masks, batches and sizes change."""

from __future__ import annotations

from typing import Any

import pytest

from dbsp_core import Strategy
from tests.core.runtime.session_cases import Session

SOL = {"source": "sol", "tau": 0.3, "block_q": 16, "block_k": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "heads over three ranks": ("U3R1", {}),
    "a plan for each call": ("U2R2", {"reuse": 1.0}),
    "first steps dense": ("U2R1", {"dense_schedule": {"first_steps": 2}, "debug": True}),
    "keys in chunks": ("U1R3", {}),
    "text that is not dense": ("U1R2", {"mask": SOL | {"dense_text": False, "token_order": "tile:1x2x5"}}),
}


def passes(rank: int, world: int, settings: dict[str, Any], strategy: str) -> float:
    """Steps of two guidance passes over two layers, with and without text, then of two items. The worst error."""
    session = Session({"mask": SOL} | settings, strategy, layers=2)
    errors = []
    for step in range(3):
        for text in (0, 7):
            errors.append(session.attend(900.0 - step, batch=1 + (step == 2), text_tokens=text))
    return max(errors)


@pytest.mark.parametrize(("strategy", "settings"), CASES.values(), ids=CASES)
def test_exact_while_everything_changes(threads, settings, strategy):
    assert max(threads(Strategy.parse(strategy).world).run(passes, settings, strategy)) <= 1e-5
