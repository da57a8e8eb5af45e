"""Each transformer class that db-SP knows: with sparse masks as in one process, with dense ones as stock."""

from __future__ import annotations

import pytest

from dbsp_diffusers.models import ARCHITECTURES
from model_cases import run_model
from tiny_transformers import TINY

TOLERANCE = 1e-5


@pytest.mark.parametrize("model", TINY)
@pytest.mark.parametrize(
    ("strategy", "layout"), [("U2R1", "contiguous"), ("U1R2", "striped"), ("U2R2", "striped")], ids=lambda part: part
)
def test_equals_one_process(pool, model, strategy, layout):
    """105 tokens of video or 35 of an image, and 9 of text, none of which the ranks divide."""
    world = 4 if strategy == "U2R2" else 2
    for found in pool(world).run(run_model, model, strategy, layout):
        for (source, batch), (difference, from_dense) in found.items():
            assert difference <= TOLERANCE, (source, batch)
            assert source == "stock" or from_dense > 100 * TOLERANCE, "the mask must matter"


def test_every_known_class_is_tried():
    assert {tiny.cls for tiny in TINY.values()} == set(ARCHITECTURES)
