"""Each transformer class that db-SP knows: with sparse masks as in one process, with dense ones as stock."""

from __future__ import annotations

import pytest

from dbsp_core import Strategy
from dbsp_diffusers.models import ARCHITECTURES
from tests.diffusers.models.model_cases import run_model
from tests.support.models.tiny_transformers import TINY

TOLERANCE = 1e-5


WAYS = [("U2R1", "contiguous"), ("U1R3", "striped"), ("U2R2", "striped")]
CASES = [
    pytest.param(
        model,
        strategy,
        layout,
        "processes" if number % 4 == way == 0 else "threads",
        marks=() if way == 2 or way == number % 2 else pytest.mark.long,
    )
    for number, model in enumerate(TINY)
    for way, (strategy, layout) in enumerate(WAYS)
]
"""Each model on four ranks, and every second one on two or on three; all in the long part."""


@pytest.mark.parametrize(("model", "strategy", "layout", "on"), CASES)
def test_equals_one_process(pool, threads, model, strategy, layout, on):
    """105 tokens of video or 35 of an image, and 9 of text, none of which the ranks divide."""
    ranks = (pool if on == "processes" else threads)(Strategy.parse(strategy).world)
    for found in ranks.run(run_model, model, strategy, layout):
        for (source, batch), (difference, from_dense) in found.items():
            assert difference <= TOLERANCE, (source, batch)
            assert source == "stock" or from_dense > 100 * TOLERANCE, "the mask must matter"


def test_every_known_class_is_tried():
    assert {tiny.cls for tiny in TINY.values()} == set(ARCHITECTURES)
