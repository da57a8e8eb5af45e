"""Each transformer class that db-SP knows: with sparse masks as in one process, with dense ones as stock."""

from __future__ import annotations

import pytest

from dbsp_diffusers.models import ARCHITECTURES
from tests.diffusers.models.model_cases import run_model
from tests.support.models.tiny_transformers import TINY

TOLERANCE = 1e-5


WAYS = [("U2R1", "contiguous"), ("U1R2", "striped"), ("U2R2", "striped")]
CASES = [(model, *way) for model in TINY for way in WAYS]


@pytest.mark.parametrize(
    ("model", "strategy", "layout", "on"),
    [(*case, "processes" if place % 4 == 0 else "threads") for place, case in enumerate(CASES)],
)
def test_equals_one_process(pool, threads, model, strategy, layout, on):
    """105 tokens of video or 35 of an image, and 9 of text, none of which the ranks divide."""
    ranks = (pool if on == "processes" else threads)(4 if strategy == "U2R2" else 2)
    for found in ranks.run(run_model, model, strategy, layout):
        for (source, batch), (difference, from_dense) in found.items():
            assert difference <= TOLERANCE, (source, batch)
            assert source == "stock" or from_dense > 100 * TOLERANCE, "the mask must matter"


def test_every_known_class_is_tried():
    assert {tiny.cls for tiny in TINY.values()} == set(ARCHITECTURES)
