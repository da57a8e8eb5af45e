"""Inputs that ranks must have identically: compared as a generation begins, and the first rank's in every pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import dbsp_diffusers
from dbsp_diffusers.models.token_sequence import Readings
from dbsp_diffusers.sharding.generation_checks import are_close
from dbsp_diffusers.sharding.pass_inputs import substitute
from tests.diffusers.test_coverage import CONFIG
from tests.support.models.tiny_pipelines import alone, latents, load
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.outcomes import assert_near, said
from tests.support.single_process import attach_single_process
from tests.support.steady_cases import collectives

DENSE: dict[str, Any] = {"mask": {"source": "dense", "block_q": 16, "block_k": 16}}


def _inputs(timestep: int = 900) -> dict[str, Any]:
    return tiny_inputs("wan") | {"timestep": torch.tensor([timestep])}


LATENTS_DIFFER = "UserError: the latents that a generation begins with differ on rank(s) [1]"
CONDITION = "UserError: the text or another condition differs on rank(s) [1] ({})"


@torch.no_grad()
def differing_inputs(rank: int, world: int) -> None:
    """Runs transformers whose last rank is given something else, twice."""
    odd = rank == world - 1
    wan, flux = make_tiny_transformer("wan"), make_tiny_transformer("flux", guidance_embeds=True)
    of_flux = tiny_inputs("flux") | {"guidance": torch.tensor([3.5])}
    text = _inputs()["encoder_hidden_states"] * (0.97 if odd else 1)
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (wan, _inputs() | {"encoder_hidden_states": text}, CONDITION.format("encoder_hidden_states")),
        (
            wan,
            _inputs() | {"attention_kwargs": {"scale": 1.0 + odd}},
            "UserError: the transformer's arguments attention_kwargs differ on rank(s) [1]",
        ),
        (flux, of_flux | {"guidance": torch.tensor([3.5 + 3.5 * odd])}, CONDITION.format("guidance")),
        (flux, of_flux | {"img_ids": of_flux["img_ids"] + odd}, CONDITION.format("img_ids")),
    ]
    for transformer, inputs, message in cases:
        dbsp_diffusers.enable(transformer, DENSE)
        for _ in range(2):
            answer = said(lambda inputs=inputs, model=transformer: model(**inputs))  # type: ignore[misc]
            assert answer.startswith(message), answer
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
    assert said(lambda: transformer(**other)).startswith(LATENTS_DIFFER)
    dbsp_diffusers.disable(transformer)


def test_inputs_with_gradients_are_compared_at_every_pass(pool):
    pool(2).run(gradients_of_inputs)


def comparisons_of_passes(rank: int, world: int, training: bool) -> list[dict[str, int]]:
    """Returns the collectives of five passes of one generation, by name, but for those of attention."""
    transformer, counts = make_tiny_transformer("wan").train(training), []
    dbsp_diffusers.enable(transformer, DENSE)
    for _ in range(5):
        with torch.set_grad_enabled(training), collectives() as seen:
            transformer(**_inputs())
        counts.append({name: number for name, number in seen.items() if name != "all_to_all_single"})
    dbsp_diffusers.disable(transformer)
    return counts


STEADY = {
    False: {"broadcast": 1, "_all_gather_single": 1, "all_gather": 1},  # inputs, what differs, the output
    True: {"broadcast": 2, "all_gather": 2},  # header and inputs, comparison, the output
}
"""Collectives of a steady pass, without training and with it."""


@pytest.mark.parametrize("training", STEADY)
def test_steady_passes_compare_once(pool, training):
    for _, _, *steady in pool(2).run(comparisons_of_passes, training):
        assert steady == [STEADY[training]] * 3


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


def test_constant_has_one_substitute_with_the_values_of_each_pass():
    substitutes, own = Readings(), torch.zeros(3)
    first, *later = (substitute(substitutes, own, torch.full((3,), float(value))) for value in range(3))
    assert later[0] is later[1] is not first
    assert later[0].tolist() == [2.0] * 3
    version = later[0]._version
    assert substitute(substitutes, own, torch.ones(3)).tolist() == [1.0] * 3
    assert later[0]._version == version
    own += 1
    assert substitute(substitutes, own, torch.ones(3)) is not later[0]


DRIFTS = "the latents differ on rank(s) [1]"


def drifting_call(rank: int, world: int, folder: str) -> None:
    """Calls a pipeline whose callback draws noise from a generator of each rank's own, from the third step on."""
    pipe, draws = load("wan", folder), np.random.default_rng(rank)
    dbsp_diffusers.enable(pipe, DENSE, guidance=True)

    def noisy(pipe: Any, step: int, timestep: Any, kept: dict[str, Any]) -> dict[str, Any]:
        if step >= 2:
            noise = draws.standard_normal(kept["latents"].shape)
            kept["latents"] = kept["latents"] + 0.3 * torch.from_numpy(noise).to(kept["latents"])
        return kept

    expected = latents(pipe, num_inference_steps=1)
    answer = said(lambda: latents(pipe, callback_on_step_end=noisy, num_inference_steps=4))
    assert answer.startswith(f"UserError: {DRIFTS} within a generation"), answer
    assert torch.equal(latents(pipe, num_inference_steps=1), expected), "the next call is right"
    dbsp_diffusers.disable(pipe)


def test_noise_of_each_ranks_own_in_a_callback_is_an_error_on_all_ranks(pool, folder):
    pool(2).run(drifting_call, folder)


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
