"""What the workers run: batches whose items differ in size, against one process."""

from __future__ import annotations

from typing import Any

import torch

import dbsp_diffusers
from dbsp_core.masks.steps import first_value
from tests.diffusers.models.model_cases import DENSE, MASKS, apart, outputs
from tests.support.models.tiny_pipelines import fingerprint
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.shared import shared
from tests.support.single_process import attach_single_process

BATCH = 4
SPARSE = {"mask": MASKS["sparge"] | {"block_q": 8}, "strategy": "U1R2"}


def ragged(model: str) -> dict[str, Any]:
    """Four items: the first and the third are of one size, whose prompts are filled up identically."""
    inputs = tiny_inputs(model, batch=BATCH)
    if model == "ernie-image":
        return inputs | {"text_lens": torch.tensor([9, 6, 9, 13])}
    captions = torch.randn(BATCH, 70, 16, generator=torch.Generator().manual_seed(2))
    lengths, images = (9, 40, 12, 70), list(inputs["x"])
    images[3] = images[3].transpose(2, 3).contiguous()  # as many tokens, in other rows and columns
    return inputs | {"x": images, "cap_feats": [one[:length] for one, length in zip(captions, lengths, strict=True)]}


def item_of(inputs: dict[str, Any], item: int) -> dict[str, Any]:
    return {name: value if isinstance(value, bool) else value[item : item + 1] for name, value in inputs.items()}


@shared
def one_process(model: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns what a transformer as it is gives for the whole batch, and with sparse masks item by item."""
    transformer, inputs = make_tiny_transformer(model), ragged(model)
    with torch.no_grad():
        dense = outputs(transformer, inputs)
        attach_single_process(transformer, SPARSE)
        by_item = [one for item in range(BATCH) for one in outputs(transformer, item_of(inputs, item))]
    return dense, by_item


def flat(found: list[torch.Tensor], model: str) -> list[torch.Tensor]:
    """Returns outputs by item."""
    return list(found[0].split(1)) if model == "ernie-image" else found


def run_ragged(rank: int, world: int, model: str) -> tuple[float, float, float, int]:
    """Returns the largest difference from stock with dense masks and from single items with sparse ones, the masks'
    effect, and how many sizes were planned for."""
    transformer, inputs, (stock, single) = make_tiny_transformer(model), ragged(model), one_process(model)
    before = fingerprint(transformer)
    with torch.no_grad():
        dbsp_diffusers.enable(transformer, DENSE | {"strategy": "U1R2"})
        dense = outputs(transformer, inputs)
        dbsp_diffusers.disable(transformer)
        session = dbsp_diffusers.enable(transformer, SPARSE)
        outputs(transformer, inputs)
        sparse = flat(outputs(transformer, inputs), model)
        named = transformer(**inputs | {"return_dict": True}).sample
        sizes = len(session._sizes)
        dbsp_diffusers.disable(transformer)
    assert apart(flat(list(named) if isinstance(named, list) else [named], model), sparse) == 0
    assert fingerprint(transformer) == before
    return apart(dense, stock), apart(sparse, single), apart(flat(stock, model), single), sizes


def schedule_read_once() -> bool:
    """Returns whether timesteps of parts of a batch stay views of the pipeline's schedule."""
    from dbsp_diffusers.sharding.batch_parts import part_of

    schedule = torch.tensor([900.0, 500.0])
    part = part_of({"timestep": schedule[1].expand(BATCH)}, (0, 2), BATCH)["timestep"]
    return part._base is schedule and first_value(part) == 500.0 and len(part) == 2


def unsupported(model: str, change: str) -> str:
    """Returns what is said where items of several sizes cannot be run."""
    transformer = make_tiny_transformer(model)
    dbsp_diffusers.enable(transformer, SPARSE | {"strategy": "U1R1"})
    if change == "checkpointing":
        transformer.train().enable_gradient_checkpointing()
    else:
        transformer._is_cached = True  # as cache-dit leaves it
    try:
        with torch.set_grad_enabled(change == "checkpointing"):
            transformer(**ragged(model))
    except ValueError as error:
        return str(error)
    return "nothing"
