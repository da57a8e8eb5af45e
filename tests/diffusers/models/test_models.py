"""Each transformer class that db-SP knows: with sparse masks as in one process, with dense ones as stock."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import dbsp_diffusers
from dbsp_core import Strategy
from dbsp_diffusers.models import ARCHITECTURES, architecture_of, register_architecture
from tests.diffusers.models.model_cases import DENSE, WITHOUT_GRID, run_model
from tests.support.models.tiny_transformers import TINY, make_tiny_transformer, tiny_inputs
from tests.support.outcomes import assert_near, outputs

STRATEGIES = ("U2R1", "U1R2", "U2R2")
SOURCES = ("synthetic", "sparge")


VARIANTS = ("wan-ti2v", "cogvideox1.0", "flux-reference", "ltx2.3", "qwen-layered")
"""Each class's first model and these run on one strategy with one source; all else is in the long part."""


def cases():
    known = set()
    for number, (model, tiny) in enumerate(TINY.items()):
        usual = "U2R2" if number % 6 == 5 else STRATEGIES[number % 2]
        is_usual = tiny.cls not in known or model in VARIANTS
        known.add(tiny.cls)
        sources = SOURCES[1:] if model in WITHOUT_GRID else SOURCES
        for strategy in STRATEGIES:
            if strategy == usual and is_usual:
                on = "processes" if number % 12 == 0 else "threads"
                source = sources[number // 2 % len(sources)]
                yield pytest.param(model, strategy, (source,), on, id=f"{model}-{strategy}-{source}-{on}")
            else:
                marks = pytest.mark.long
                yield pytest.param(model, strategy, sources, "threads", id=f"{model}-{strategy}", marks=marks)


@pytest.mark.parametrize(("model", "strategy", "sources", "on"), [*cases()])
def test_model_equals_one_process(pool, threads, model, strategy, sources, on):
    """Runs on 105 tokens of video or 35 of an image, and 9 of text, none of which the ranks divide."""
    ranks = (pool if on == "processes" else threads)(Strategy.parse(strategy).world)
    ranks.run(run_model, model, strategy, sources)


def test_every_known_class_is_tried():
    assert {tiny.cls for tiny in TINY.values()} == set(ARCHITECTURES)


USUAL = ("hunyuan-image", "framepack", "z-image", "ltx2")
"""Models that keep different things; all others train after inference in the long part."""


def train_after_inference(rank: int, world: int, model: str) -> None:
    transformer, inputs = make_tiny_transformer(model), tiny_inputs(model)
    dbsp_diffusers.enable(transformer, DENSE | {"strategy": "U2R1"})
    with torch.inference_mode():
        validated = [one.clone() for one in outputs(transformer, inputs)]
    trained = outputs(transformer, inputs)
    sum(one.square().sum() for one in trained).backward()
    with torch.no_grad():
        assert_near(validated, trained)
    assert any(parameter.grad is not None for parameter in transformer.parameters())


@pytest.mark.parametrize(
    "model", [pytest.param(model, marks=() if model in USUAL else pytest.mark.long) for model in TINY]
)
def test_model_after_a_pass_in_inference_mode_trains(threads, model):
    """Expects such a pass to leave nothing behind that a training pass of the same size cannot use."""
    threads(2).run(train_after_inference, model)


def made(name: str, *bases: type) -> nn.Module:
    return type(name, bases or (nn.Module,), {})()


def test_registered_class_and_its_subclasses_are_known(monkeypatch):
    monkeypatch.setattr("dbsp_diffusers.models.ARCHITECTURES", dict(ARCHITECTURES))
    pixart = made("PixArtTransformer2DModel")
    with pytest.raises(ValueError, match=r"does not know PixArtTransformer2DModel; it knows .*one entry"):
        architecture_of(pixart)
    ours = ARCHITECTURES["WanTransformer3DModel"]
    register_architecture("PixArtTransformer2DModel", ours)
    assert architecture_of(pixart) is architecture_of(made("Mine", type(pixart))) is ours
    assert "PixArtTransformer2DModel" not in ARCHITECTURES
