"""What the workers run: ranks whose inputs, arguments or random numbers differ, by much or by rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import dbsp_diffusers
from tests.diffusers.coverage_cases import CONFIG, said
from tests.support.models.tiny_pipelines import difference, load
from tests.support.models.tiny_transformers import make_tiny_transformer, tiny_inputs
from tests.support.models.transformers_for_tests import Inputs, make_transformer
from tests.support.single_process import attach_single_process

WINDOW: dict[str, Any] = {"mask": {"source": "window", "block_q": 16, "block_k": 16}}
SIZE = {"height": 64, "width": 96, "num_frames": 9, "max_sequence_length": 16, "output_type": "latent"}
DENSE: dict[str, Any] = {"mask": {"source": "dense", "block_q": 16, "block_k": 16}}


def _inputs(timestep: int = 900) -> dict[str, Any]:
    return Inputs.random("wan", (3, 5, 7), 1, 7).arguments | {"timestep": torch.tensor([timestep])}


def differing_inputs(rank: int, world: int) -> dict[str, list[str]]:
    """What a transformer says whose last rank is given something else: at the first pass, and at the second."""
    odd, found = rank == world - 1, {}
    wan, flux = make_transformer("wan"), make_tiny_transformer("flux", guidance_embeds=True)
    of_flux = tiny_inputs("flux", batch=1) | {"guidance": torch.tensor([3.5])}

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
    with torch.no_grad():
        for name, (transformer, inputs) in cases.items():
            dbsp_diffusers.enable(transformer, DENSE)
            found[name] = [said(lambda inputs=inputs, model=transformer: model(**inputs)) for _ in range(2)]  # type: ignore[misc]
            dbsp_diffusers.disable(transformer)
    return found


def differing_by_rounding(rank: int, world: int) -> list[float]:
    """Largest differences of four passes from one process that is given the first rank's inputs."""
    transformer, found = make_transformer("wan"), []
    with torch.no_grad():
        for enabled in (False, True):
            single = None if enabled else attach_single_process(transformer, CONFIG)
            if enabled:
                dbsp_diffusers.enable(transformer, CONFIG)
            outputs, text = [], _inputs()["encoder_hidden_states"]
            for step, timestep in enumerate((900, 500, 400, 300)):
                inputs = _inputs(timestep) | {"encoder_hidden_states": text}
                if enabled:
                    error = 1 + (0.5 if step > 1 else 1e-3) * rank
                    inputs["hidden_states"] = inputs["hidden_states"] * error
                    inputs["encoder_hidden_states"] = text * (1 + 1e-3 * rank) if step < 2 else text
                outputs.append(transformer(**inputs)[0])
            if single is not None:
                single.detach()
            found.append(outputs)
        dbsp_diffusers.disable(transformer)
    return [difference(one, other) for one, other in zip(*found, strict=True)]


def gradients_of_inputs(rank: int, world: int) -> tuple[str, bool]:
    """(what a pass says with inputs that require gradients and differ between ranks, whether equal ones have them)"""
    transformer = make_transformer("wan")
    dbsp_diffusers.enable(transformer, DENSE)
    own = _inputs()
    equal = own | {"hidden_states": own["hidden_states"].requires_grad_()}
    transformer(**equal)[0].sum().backward()
    other = own | {"hidden_states": (own["hidden_states"].detach() * (1 + rank)).requires_grad_()}
    text = said(lambda: transformer(**other))
    dbsp_diffusers.disable(transformer)
    return text, equal["hidden_states"].grad is not None


def reads_of_a_mask(rank: int, world: int) -> list[int]:
    """How often the padding of a prompt was read from its mask by the end of each of four passes."""
    from dbsp_diffusers.models import token_sequence

    counted: list[int] = []
    read, transformer = token_sequence.read_once, make_tiny_transformer("hunyuan")
    inputs, reads = tiny_inputs("hunyuan", batch=1), 0

    def counting(tensor: torch.Tensor, function: Callable[[torch.Tensor], Any]) -> Any:
        def count(tensor: torch.Tensor) -> Any:
            nonlocal reads
            reads += 1
            return function(tensor)

        return read(tensor, count)

    token_sequence.read_once = counting
    try:
        dbsp_diffusers.enable(transformer, DENSE)
        with torch.no_grad():
            for _ in range(4):
                transformer(**inputs)
                counted.append(reads)
        dbsp_diffusers.disable(transformer)
    finally:
        token_sequence.read_once = read
    return counted


def noise_of_a_scheduler(rank: int, world: int, folder: str) -> list[float]:
    """Differences from one process in the first rank's state: of latents with a scheduler that draws, twice, and of
    what is drawn afterwards."""
    from diffusers import FlowMatchLCMScheduler

    pipe: Any = load("wan", folder)
    pipe.scheduler = FlowMatchLCMScheduler(shift=3.0)

    def made() -> list[torch.Tensor]:
        torch.manual_seed(1000)
        size = SIZE | {"num_inference_steps": 3, "guidance_scale": 1.0}
        return [pipe("the sea", **size).frames, pipe("the sea", **size).frames, torch.randn(3)]

    single = attach_single_process(pipe.transformer, CONFIG)
    expected = made()
    single.detach()
    dbsp_diffusers.enable(pipe, CONFIG)
    seed, torch.manual_seed = (
        torch.manual_seed,
        lambda number: seed(number + rank),
    )  # as if they were not seeded identically
    try:
        found = made()
    finally:
        torch.manual_seed = seed
    dbsp_diffusers.disable(pipe)
    return [difference(one, other) for one, other in zip(found, expected, strict=True)]


def enabled_within_a_call(rank: int, world: int, folder: str) -> tuple[float, float]:
    """Differences of latents, enabled after the first of four steps, from one process with 2 dense steps and 3."""
    pipe: Any = load("wan", folder)

    def made(**more: Any) -> torch.Tensor:
        size = SIZE | {"num_inference_steps": 4, "guidance_scale": 2.0}
        return pipe("the sea", generator=torch.Generator().manual_seed(0), **size, **more).frames  # type: ignore[no-any-return]

    def alone(steps: int) -> torch.Tensor:
        single = attach_single_process(pipe.transformer, CONFIG | {"dense_schedule": {"first_steps": steps}})
        try:
            return made()
        finally:
            single.detach()

    def switch_on(pipe: Any, step: int, timestep: Any, kept: dict[str, Any]) -> dict[str, Any]:
        if step == 0:
            dbsp_diffusers.enable(pipe, CONFIG | {"dense_schedule": {"first_steps": 2}})
        return kept

    expected, shifted = alone(2), alone(3)
    found = made(callback_on_step_end=switch_on)
    again = made()
    dbsp_diffusers.disable(pipe)
    assert difference(again, expected) <= 1e-4
    return difference(found, expected), difference(found, shifted)
