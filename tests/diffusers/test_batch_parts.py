"""Prompts of different length, and images of different size, in one batch: exact against one process."""

from __future__ import annotations

import pytest
import torch

from dbsp_diffusers.sharding.batch_parts import join_parts, part_of, parts_by_size
from tests.diffusers.batch_cases import run_ragged, schedule_read_once, unsupported

TOLERANCE = 1e-5


@pytest.mark.parametrize(("model", "sizes"), [("z-image", 3), ("ernie-image", 3)])
def test_batch_of_several_sizes_equals_one_process(threads, model, sizes):
    for from_stock, from_items, effect, planned in threads(2).run(run_ragged, model):
        assert from_stock <= TOLERANCE
        assert from_items <= TOLERANCE
        assert effect > 100 * TOLERANCE, "the mask must matter"
        assert planned == sizes


def test_schedule_of_timesteps_is_read_once():
    assert schedule_read_once()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("checkpointing", "with gradient checkpointing, items of one batch"),
        ("cache", "with a step cache, items of one"),
    ],
)
def test_feature_that_needs_items_of_one_size_is_rejected(change, message):
    assert unsupported("ernie-image", change).startswith(message)


def test_parts_are_taken_and_joined():
    parts = parts_by_size([9, 6, 9])
    assert parts == [(0, 2), (1,)]
    lengths, sample = torch.tensor([9, 6, 9]), torch.arange(6.0).view(3, 2)
    inputs = {"x": ["a", "b", "c"], "sample": sample, "lengths": lengths, "scale": 2, "table": torch.zeros(4)}
    first, second = (part_of(inputs, items, 3) for items in parts)
    assert (first["x"], second["x"]) == (["a", "c"], ["b"])
    assert first["sample"].tolist() == [[0, 1], [4, 5]]
    assert (first["scale"], first["table"]) == (2, inputs["table"])
    assert part_of(inputs, parts[0], 3)["lengths"] is first["lengths"], "what was read of it is known"
    lengths[0] = 6
    assert part_of(inputs, parts[0], 3)["lengths"].tolist() == [6, 9]
    out = join_parts([{"sample": first["sample"]}, {"sample": second["sample"]}], parts)
    assert torch.equal(out["sample"], sample)
    assert join_parts([(["a", "c"],), (["b"],)], parts) == (["a", "b", "c"],)
