"""Each transformer class that db-SP knows: with sparse masks as in one process, with dense ones as stock."""

from __future__ import annotations

import pytest

from dbsp_core import Strategy
from dbsp_diffusers.models import ARCHITECTURES
from tests.diffusers.models.model_cases import WITHOUT_GRID, run_model
from tests.support.models.tiny_transformers import TINY

TOLERANCE = 1e-5


STRATEGIES = ("U2R1", "U1R2", "U2R2")
SOURCES = ("synthetic", "sparge")


def cases():
    """Each model on one strategy with one mask source, one in six on four ranks; all strategies in the long part."""
    for number, model in enumerate(TINY):
        usual = "U2R2" if number % 6 == 5 else STRATEGIES[number % 2]
        sources = SOURCES[1:] if model in WITHOUT_GRID else SOURCES
        for strategy in STRATEGIES:
            if strategy == usual:
                on = "processes" if number % 6 == 0 else "threads"
                source = sources[number // 2 % len(sources)]
                yield pytest.param(model, strategy, (source,), on, id=f"{model}-{strategy}-{source}-{on}")
            else:
                marks = pytest.mark.long
                yield pytest.param(model, strategy, sources, "threads", id=f"{model}-{strategy}", marks=marks)


@pytest.mark.parametrize(("model", "strategy", "sources", "on"), [*cases()])
def test_model_equals_one_process(pool, threads, model, strategy, sources, on):
    """105 tokens of video or 35 of an image, and 9 of text, none of which the ranks divide."""
    ranks = (pool if on == "processes" else threads)(Strategy.parse(strategy).world)
    for found in ranks.run(run_model, model, strategy, sources):
        for source, (difference, from_dense) in found.items():
            assert difference <= TOLERANCE, source
            assert source == "stock" or from_dense > 100 * TOLERANCE, "the mask must matter"


def test_every_known_class_is_tried():
    assert {tiny.cls for tiny in TINY.values()} == set(ARCHITECTURES)
