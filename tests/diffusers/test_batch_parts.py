"""Prompts of different length, and images of different size, in one batch: exact against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import dbsp_diffusers
from dbsp_core.masks.steps import first_value
from dbsp_diffusers.sharding.pass_inputs import join_parts, part_of, parts_by_size
from tests.diffusers.models.model_cases import DENSE, MASKS
from tests.support.models.tiny_pipelines import fingerprint
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.outcomes import alone, apart, assert_near, outputs, said
from tests.support.shared import shared

BATCH = 4
SPARSE = {"mask": MASKS["sparge"] | {"block_q": 8}, "strategy": "U1R2"}


def ragged(model: str) -> dict[str, Any]:
    """Returns four items: the first and the third are of one size, whose prompts are filled up identically."""
    inputs = tiny_inputs(model, batch=BATCH)
    if model == "ernie-image":
        return inputs | {"text_lens": torch.tensor([9, 6, 9, 13])}
    captions = torch.randn(BATCH, 70, 16, generator=torch.Generator().manual_seed(2))
    lengths, images = (9, 40, 12, 70), list(inputs["x"])
    images[3] = images[3].transpose(2, 3).contiguous()  # as many tokens, in other rows and columns
    return inputs | {"x": images, "cap_feats": [one[:length] for one, length in zip(captions, lengths, strict=True)]}


@shared
def one_process(model: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns what a transformer as it is gives for the whole batch, and with sparse masks item by item."""
    transformer, inputs = make_tiny_transformer(model), ragged(model)
    items = [
        {name: value if isinstance(value, bool) else value[item : item + 1] for name, value in inputs.items()}
        for item in range(BATCH)
    ]
    with torch.no_grad():
        dense = outputs(transformer, inputs)
    return dense, [one for item in items for one in alone(transformer, item, SPARSE)]


def flat(found: list[torch.Tensor], model: str) -> list[torch.Tensor]:
    """Returns outputs by item."""
    return list(found[0].split(1)) if model == "ernie-image" else found


@torch.no_grad()
def run_ragged(rank: int, world: int, model: str) -> None:
    """Compares a batch of three sizes with stock, and with single items under sparse masks."""
    transformer, inputs, (stock, single) = make_tiny_transformer(model), ragged(model), one_process(model)
    before = fingerprint(transformer)
    dbsp_diffusers.enable(transformer, DENSE | {"strategy": "U1R2"})
    assert_near(outputs(transformer, inputs), stock)
    dbsp_diffusers.disable(transformer)
    session = dbsp_diffusers.enable(transformer, SPARSE)
    for _ in range(2):
        sparse = flat(outputs(transformer, inputs), model)
    assert_near(sparse, single, flat(stock, model))
    named = transformer(**inputs | {"return_dict": True}).sample
    assert apart(flat(list(named) if isinstance(named, list) else [named], model), sparse) == 0
    assert len(session._sizes) == 3
    dbsp_diffusers.disable(transformer)
    assert fingerprint(transformer) == before


@pytest.mark.parametrize("model", ["z-image", "ernie-image"])
def test_batch_of_several_sizes_equals_one_process(threads, model):
    threads(2).run(run_ragged, model)


def test_step_cache_with_items_of_several_sizes_is_rejected():
    transformer = make_tiny_transformer("ernie-image")
    dbsp_diffusers.enable(transformer, SPARSE | {"strategy": "U1R1"})
    transformer._is_cached = True  # as cache-dit leaves it
    with torch.no_grad():
        answer = said(lambda: transformer(**ragged("ernie-image")))
    assert answer.startswith("UserError: with a step cache, items of one")


def test_parts_of_tensors():
    """Expects timesteps to stay views of the schedule, so that they are read once, and nothing of inference mode."""
    schedule, lengths = torch.tensor([900.0, 500.0]), torch.tensor([9, 6, 9])
    part = part_of({"timestep": schedule[1].expand(BATCH)}, (0, 2), BATCH)["timestep"]
    assert part._base is schedule
    assert (first_value(part), len(part)) == (500.0, 2)
    with torch.inference_mode():
        part_of({"lengths": lengths}, (0, 2), 3)
    assert not part_of({"lengths": lengths}, (0, 2), 3)["lengths"].is_inference()


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
