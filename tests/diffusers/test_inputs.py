"""Inputs that ranks must have identically: compared as a generation begins, and the first rank's in every pass."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import dbsp_diffusers
from dbsp_diffusers.models import token_sequence
from dbsp_diffusers.sharding.generation_checks import are_close
from dbsp_diffusers.sharding.pass_inputs import Constants, named_tensors, plain_values, with_tensors
from tests.diffusers.test_coverage import CONFIG
from tests.support.models.tiny_pipelines import SIZE, alone, latents, load
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.outcomes import apart, assert_near, said
from tests.support.single_process import attach_single_process

DENSE: dict[str, Any] = {"mask": {"source": "dense", "block_q": 16, "block_k": 16}}


def _inputs(timestep: int = 900) -> dict[str, Any]:
    return tiny_inputs("wan") | {"timestep": torch.tensor([timestep])}


CONDITION = "UserError: the text or another condition differs on rank(s) [1] ({})"
DIFFERENCES = {
    "latents": "UserError: the latents that a generation begins with differ on rank(s) [1]",
    "text": CONDITION.format("encoder_hidden_states"),
    "timestep": CONDITION.format("timestep"),
    "scale of a LoRA": "UserError: the transformer's arguments attention_kwargs differ on rank(s) [1]",
    "guidance": CONDITION.format("guidance"),
    "positions": CONDITION.format("img_ids"),
}


@torch.no_grad()
def differing_inputs(rank: int, world: int) -> None:
    """Runs transformers whose last rank is given something else, twice."""
    odd = rank == world - 1
    wan, flux = make_tiny_transformer("wan"), make_tiny_transformer("flux", guidance_embeds=True)
    of_flux = tiny_inputs("flux") | {"guidance": torch.tensor([3.5])}

    def scaled(name: str, by: float) -> dict[str, Any]:
        own = _inputs()
        return own | {name: own[name] * by} if odd else own

    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "latents": (wan, scaled("hidden_states", 1.03)),
        "text": (wan, scaled("encoder_hidden_states", 0.97)),
        "timestep": (wan, _inputs(900 - odd)),
        "scale of a LoRA": (wan, _inputs() | {"attention_kwargs": {"scale": 1.0 + odd}}),
        "guidance": (flux, of_flux | {"guidance": torch.tensor([3.5 + 3.5 * odd])}),
        "positions": (flux, of_flux | {"img_ids": of_flux["img_ids"] + odd}),
    }
    for name, message in DIFFERENCES.items():
        transformer, inputs = cases[name]
        dbsp_diffusers.enable(transformer, DENSE)
        for _ in range(2):
            answer = said(lambda inputs=inputs, model=transformer: model(**inputs))  # type: ignore[misc]
            assert answer.startswith(message), (name, answer)
        dbsp_diffusers.disable(transformer)


def test_inputs_that_differ_in_magnitude_raise_on_all_ranks(pool):
    pool(2).run(differing_inputs)


@torch.no_grad()
def differing_by_rounding(rank: int, world: int) -> None:
    """Runs four passes with inputs of a rank's own, whose outputs are those of the first rank's inputs."""
    transformer, text, expected = make_tiny_transformer("wan"), _inputs()["encoder_hidden_states"], []
    single, timesteps = attach_single_process(transformer, CONFIG), (900, 500, 400, 300)
    for timestep in timesteps:
        expected.append(transformer(**_inputs(timestep) | {"encoder_hidden_states": text})[0])
    single.detach()
    dbsp_diffusers.enable(transformer, CONFIG)
    for step, timestep in enumerate(timesteps):
        inputs = _inputs(timestep)
        inputs["hidden_states"] = inputs["hidden_states"] * (1 + (0.5 if step > 1 else 1e-3) * rank)
        inputs["encoder_hidden_states"] = text * (1 + 1e-3 * rank) if step < 2 else text
        assert_near(transformer(**inputs)[0], expected[step])
    dbsp_diffusers.disable(transformer)


def test_inputs_off_by_rounding_are_replaced_by_the_first_ranks(pool):
    pool(2).run(differing_by_rounding)


def gradients_of_inputs(rank: int, world: int) -> None:
    """Runs passes with inputs that require gradients: equal ones, and ones that differ between ranks."""
    transformer, own = make_tiny_transformer("wan"), _inputs()
    dbsp_diffusers.enable(transformer, DENSE)
    equal = own | {"hidden_states": own["hidden_states"].requires_grad_()}
    transformer(**equal)[0].sum().backward()
    assert equal["hidden_states"].grad is not None
    other = own | {"hidden_states": (own["hidden_states"].detach() * (1 + rank)).requires_grad_()}
    assert said(lambda: transformer(**other)).startswith(DIFFERENCES["latents"])
    dbsp_diffusers.disable(transformer)


def test_inputs_with_gradients_are_compared_at_every_pass(pool):
    pool(2).run(gradients_of_inputs)


@torch.no_grad()
def reads_of_a_mask(rank: int, world: int) -> list[int]:
    """Returns how often the padding of a prompt was read from its mask by the end of each of four passes."""
    transformer, inputs, counted, reads = make_tiny_transformer("hunyuan"), tiny_inputs("hunyuan"), [], mock.Mock()
    read = token_sequence.read_once

    def counting(tensor: torch.Tensor, function: Callable[[torch.Tensor], Any]) -> Any:
        return read(tensor, lambda tensor: (reads(), function(tensor))[1])

    with mock.patch.object(token_sequence, "read_once", counting):
        dbsp_diffusers.enable(transformer, DENSE)
        for _ in range(4):
            transformer(**inputs)
            counted.append(reads.call_count)
        dbsp_diffusers.disable(transformer)
    return counted


def test_constants_are_read_no_more_once_ranks_have_substitutes(pool):
    for counted in pool(2).run(reads_of_a_mask):
        assert 0 < counted[0] <= counted[1] == counted[2] == counted[3]


def noise_of_a_scheduler(rank: int, world: int, folder: str) -> None:
    """Makes latents with a scheduler that draws, twice, and draws afterwards, in the first rank's state."""
    from diffusers import FlowMatchLCMScheduler

    pipe: Any = load("wan", folder)
    pipe.scheduler = FlowMatchLCMScheduler(shift=3.0)
    call = {"seed": None, "num_inference_steps": 3, "guidance_scale": 1.0}
    torch.manual_seed(1000)
    expected = [alone(pipe, CONFIG, **call), alone(pipe, CONFIG, **call), torch.randn(3)]
    dbsp_diffusers.enable(pipe, CONFIG)
    torch.manual_seed(1000 + rank)
    found = [latents(pipe, **call), latents(pipe, **call), torch.randn(3)]
    dbsp_diffusers.disable(pipe)
    assert_near(found, expected, tolerance=1e-4)


def test_noise_of_a_scheduler_is_that_of_one_process_on_all_ranks(pool, folder):
    pool(2).run(noise_of_a_scheduler, folder)


def enabled_within_a_call(rank: int, world: int, folder: str) -> None:
    """Enables db-SP after the first of four steps, with two dense steps; one process must count the steps so."""
    pipe: Any = load("wan", folder)
    call = {"num_inference_steps": 4}

    def dense_in(steps: int) -> dict[str, Any]:
        return CONFIG | {"dense_schedule": {"first_steps": steps}}

    def switch_on(pipe: Any, step: int, timestep: Any, kept: dict[str, Any]) -> dict[str, Any]:
        if step == 0:
            dbsp_diffusers.enable(pipe, dense_in(2))
        return kept

    expected, shifted = (alone(pipe, dense_in(steps), **call) for steps in (2, 3))
    found = latents(pipe, callback_on_step_end=switch_on, **call)
    again = latents(pipe, **call)
    dbsp_diffusers.disable(pipe)
    assert_near(found, expected, tolerance=1e-4)
    assert apart(expected, shifted) > 1e-3
    assert_near(again, expected, tolerance=1e-4)


def test_enable_within_a_call_counts_the_schedulers_steps(pool, folder):
    pool(2).run(enabled_within_a_call, folder)


def test_generator_by_position_is_used(folder):
    pipe = load("wan", folder)
    names = inspect.signature(type(pipe).__call__).parameters
    before = list(names)[1 : list(names).index("generator") + 1]

    def made() -> torch.Tensor:
        given = SIZE | {"prompt": "a", "generator": torch.Generator().manual_seed(1)}
        values = (given.get(name, names[name].default) for name in before)
        return pipe(*values, output_type="latent", max_sequence_length=16).frames

    expected = made()
    dbsp_diffusers.enable(pipe, DENSE)
    assert_near(made(), expected)
    dbsp_diffusers.disable(pipe)


class Own:
    """A pipeline of a user's own."""

    def __init__(self, transformer: torch.nn.Module) -> None:
        self.transformer = transformer

    def __call__(self) -> torch.Tensor:
        with torch.no_grad():
            return self.transformer(**tiny_inputs("wan"))[0]


def test_pipeline_of_another_kind_can_be_enabled():
    pipe = Own(make_tiny_transformer("wan"))
    expected = pipe()
    dbsp_diffusers.enable(pipe, DENSE)
    assert_near(pipe(), expected)
    dbsp_diffusers.disable(pipe)


def test_rounding_is_no_difference_and_other_values_are():
    generator = torch.Generator().manual_seed(0)
    for shape in ((1, 16, 3, 8, 12), (1, 512, 4096)):
        one, other = (torch.randn(shape, generator=generator) for _ in range(2))
        assert are_close(one, one.bfloat16())
        assert are_close(one, one * 1.005)
        some = one.clone()
        some.view(-1)[: some.numel() // 10] = 0  # of ten words, one
        for different in (other, one.roll(1, -1), -one, 2 * one, 1.02 * one, one + 10, some):
            assert not are_close(one, different)
    assert are_close(torch.tensor([3.5]), torch.tensor([3.51]))
    assert not are_close(torch.tensor([3.5]), torch.tensor([3.6]))
    assert not are_close(torch.arange(1000), torch.arange(1000) + (torch.arange(1000) == 7))
    assert not are_close(torch.ones(512, dtype=torch.bool), torch.arange(512) < 511)
    assert are_close(torch.full((5,), float("nan")), torch.full((5,), float("nan")))
    assert are_close(torch.zeros(5), torch.zeros(5))
    assert not are_close(torch.tensor([1 + 1j]), torch.tensor([1 - 1j]))


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


DRIFTS = "the latents differ on rank(s) [1]"


def drifting_call(rank: int, world: int, folder: str, from_step: int, guidance: bool) -> None:
    """Calls a pipeline whose callback draws noise from a generator of each rank's own, from some step on."""
    pipe, draws = load("wan", folder), np.random.default_rng(rank)
    dbsp_diffusers.enable(pipe, DENSE, guidance=guidance)

    def noisy(pipe: Any, step: int, timestep: Any, kept: dict[str, Any]) -> dict[str, Any]:
        if step >= from_step:
            noise = draws.standard_normal(kept["latents"].shape)
            kept["latents"] = kept["latents"] + 0.3 * torch.from_numpy(noise).to(kept["latents"])
        return kept

    expected = latents(pipe, num_inference_steps=1)
    answer = said(lambda: latents(pipe, callback_on_step_end=noisy, num_inference_steps=4))
    assert answer.startswith(f"UserError: {DRIFTS} within a generation"), answer
    assert torch.equal(latents(pipe, num_inference_steps=1), expected), "the next call is right"
    dbsp_diffusers.disable(pipe)


@pytest.mark.parametrize("guidance", [False, True])
@pytest.mark.parametrize("from_step", [0, 2])
def test_noise_of_each_ranks_own_in_a_callback_is_an_error_on_all_ranks(pool, folder, from_step, guidance):
    pool(2).run(drifting_call, folder, from_step, guidance)


@torch.no_grad()
def drifting_loop(rank: int, world: int, what: str) -> list[str]:
    """Runs one generation in a loop of a user's own, whose ranks drift apart after the second pass."""
    transformer, answers = make_tiny_transformer("wan"), []
    dbsp_diffusers.enable(transformer, DENSE)
    for number, timestep in enumerate((900, 800, 700, 600, 500, 400, 900)):
        inputs = _inputs(timestep)
        if number in (2, 3):
            inputs[what] = inputs[what] * (1 + rank)
        answers.append(said(lambda inputs=inputs: transformer(**inputs)))  # type: ignore[misc]
    dbsp_diffusers.disable(transformer)
    return answers


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("hidden_states", DRIFTS),
        ("encoder_hidden_states", "the timestep, text or another condition differs on rank(s) [1]"),
    ],
)
def test_drift_is_raised_two_passes_later_on_all_ranks(pool, what, message):
    for answers in pool(2).run(drifting_loop, what):
        assert answers[:4] == ["nothing"] * 4
        assert answers[4].startswith(f"UserError: {message} within a generation")
        assert answers[5:] == ["nothing"] * 2, "passes that do not differ are right again"
