"""What ranks must have identically: compared at the beginning of a generation, and the first rank's in every pass."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

import pytest
import torch

import dbsp_diffusers
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.sharding.generation_checks import _are_close
from dbsp_diffusers.sharding.pass_inputs import Constants, named_tensors, plain_values, with_tensors
from tests.diffusers.input_cases import (
    DENSE,
    differing_by_rounding,
    differing_inputs,
    enabled_within_a_call,
    gradients_of_inputs,
    noise_of_a_scheduler,
    reads_of_a_mask,
)
from tests.support.models.tiny_pipelines import load
from tests.support.models.transformers_for_tests import Inputs, make_transformer

TOLERANCE = 1e-5


def test_inputs_that_differ_in_magnitude_raise_on_all_ranks(pool):
    answers = pool(2).run(differing_inputs)
    assert answers[0] == answers[1]
    condition = "UserError: the text or another condition differs on rank(s) [1] ({})"
    expected = {
        "latents": "UserError: the latents that a generation begins with differ on rank(s) [1]",
        "text": condition.format("encoder_hidden_states"),
        "timestep": condition.format("timestep"),
        "scale of a LoRA": "UserError: the transformer's arguments attention_kwargs differ on rank(s) [1]",
        "guidance": condition.format("guidance"),
        "positions": condition.format("img_ids"),
    }
    assert answers[0].keys() == expected.keys()
    for name, text in expected.items():
        for said in answers[0][name]:
            assert said.startswith(text), (name, said)


def test_inputs_off_by_rounding_are_replaced_by_the_first_ranks(pool):
    for found in pool(2).run(differing_by_rounding):
        assert max(found) <= TOLERANCE, found


def test_inputs_with_gradients_are_compared_at_every_pass(pool):
    for said, has_gradient in pool(2).run(gradients_of_inputs):
        assert said.startswith("UserError: the latents that a generation begins with differ on rank(s) [1]")
        assert has_gradient


def test_constants_are_read_no_more_once_ranks_have_substitutes(pool):
    for counted in pool(2).run(reads_of_a_mask):
        assert counted[-1] == counted[-2] == counted[-3]


def test_noise_of_a_scheduler_is_that_of_one_process_on_all_ranks(pool, folder):
    for found in pool(2).run(noise_of_a_scheduler, folder):
        assert max(found) <= 1e-4, found


def test_enable_within_a_call_counts_the_schedulers_steps(pool, folder):
    for difference, shifted in pool(2).run(enabled_within_a_call, folder):
        assert difference <= 1e-4 < shifted


def test_generator_by_position_is_used(folder):
    pipe = load("wan", folder)
    names = inspect.signature(type(pipe).__call__).parameters
    given = {
        "prompt": "a",
        "height": 64,
        "width": 96,
        "num_frames": 9,
        "num_inference_steps": 1,
        "guidance_scale": 1.0,
    }

    def latents() -> torch.Tensor:
        arguments = given | {"generator": torch.Generator().manual_seed(1)}
        before = list(names)[1 : list(names).index("generator") + 1]
        values = (arguments.get(name, names[name].default) for name in before)
        return pipe(*values, output_type="latent", max_sequence_length=16).frames

    expected = latents()
    dbsp_diffusers.enable(pipe, DENSE)
    found = latents()
    dbsp_diffusers.disable(pipe)
    assert float((found - expected).abs().max()) <= TOLERANCE


class Own:
    """A pipeline of a user's own."""

    def __init__(self, transformer: torch.nn.Module) -> None:
        self.transformer = transformer

    def __call__(self) -> torch.Tensor:
        inputs = Inputs.random("wan", (3, 5, 7), 1, 7).arguments
        with torch.no_grad():
            return self.transformer(**inputs)[0]


class WithSlots:
    __slots__ = ("__weakref__", "transformer")
    __init__, __call__ = Own.__init__, Own.__call__


def test_pipeline_of_another_kind_can_be_enabled():
    pipe = Own(make_transformer("wan"))
    expected = pipe()
    dbsp_diffusers.enable(pipe, DENSE)
    found = pipe()
    dbsp_diffusers.disable(pipe)
    assert float((found - expected).abs().max()) <= TOLERANCE


def test_pipeline_with_slots_is_rejected():
    with pytest.raises(UserError, match="WithSlots has __slots__"):
        dbsp_diffusers.enable(WithSlots(make_transformer("wan")), DENSE)


class WithReferences(Own):
    """A pipeline that registers a second transformer as diffusers' pipelines do, in their configuration."""

    config: ClassVar = {"transformer_ref": ("diffusers", "WanTransformer3DModel")}

    def __init__(self) -> None:
        super().__init__(make_transformer("wan"))
        self.transformer_ref = make_transformer("wan")


def test_transformers_of_other_names_are_enabled():
    pipe = WithReferences()
    dbsp_diffusers.enable(pipe, DENSE)
    assert list(dbsp_diffusers.sessions_of(pipe)) == ["transformer", "transformer_ref"]
    usual, pipe.transformer = pipe.transformer, pipe.transformer_ref
    pipe()
    assert dbsp_diffusers.session_of(pipe.transformer_ref).statistics()["calls"] > 0
    assert dbsp_diffusers.session_of(usual).statistics()["calls"] == 0
    dbsp_diffusers.disable(pipe)


def test_rounding_is_no_difference_and_other_values_are():
    generator = torch.Generator().manual_seed(0)
    for shape in ((1, 16, 3, 8, 12), (1, 512, 4096)):
        one, other = (torch.randn(shape, generator=generator) for _ in range(2))
        assert _are_close(one, one.bfloat16())
        assert _are_close(one, one * 1.005)
        some = one.clone()
        some.view(-1)[: some.numel() // 10] = 0  # of ten words, one
        for different in (other, one.roll(1, -1), -one, 2 * one, 1.02 * one, one + 10, some):
            assert not _are_close(one, different)
    assert _are_close(torch.tensor([3.5]), torch.tensor([3.51]))
    assert not _are_close(torch.tensor([3.5]), torch.tensor([3.6]))
    assert not _are_close(torch.arange(1000), torch.arange(1000) + (torch.arange(1000) == 7))
    assert not _are_close(torch.ones(512, dtype=torch.bool), torch.arange(512) < 511)
    assert _are_close(torch.full((5,), float("nan")), torch.full((5,), float("nan")))
    assert _are_close(torch.zeros(5), torch.zeros(5))
    assert not _are_close(torch.tensor([1 + 1j]), torch.tensor([1 - 1j]))


def test_tensors_within_arguments_are_named_and_replaced():
    one, other = torch.zeros(2), torch.ones(3)
    given: dict[str, Any] = {"a": [one, {"b": (other, 1)}], "c": "text", "d": torch.zeros(0)}
    assert [name for name, _ in named_tensors("x", given)] == ["x['a'][0]", "x['a'][1]['b'][0]"]
    assert plain_values({"a": [1, object()]}) == [("a", [1, "object"])]
    new = torch.full((3,), 2.0)
    replaced = with_tensors(given, {id(other): new})
    assert replaced["a"][0] is one
    assert replaced["a"][1]["b"][0] is new
    assert given["a"][1]["b"][0] is other
    assert with_tensors(given, {}) is given


def test_constant_has_one_substitute_with_the_values_of_each_pass():
    constants, own = Constants(), torch.zeros(3)
    first, *later = (constants.substitute(own, torch.full((3,), float(value))) for value in range(3))
    assert later[0] is later[1] is not first
    assert later[0].tolist() == [2.0] * 3
    version = later[0]._version
    assert constants.substitute(own, torch.ones(3)).tolist() == [1.0] * 3
    assert later[0]._version == version
    own += 1
    assert constants.substitute(own, torch.ones(3)) is not later[0]
