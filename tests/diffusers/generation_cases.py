"""What the workers run: ranks that are not at the same generation, and go on."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

import dbsp_diffusers
from dbsp_diffusers.attached import attached_to
from tests.support.models.tiny_pipelines import difference, load
from tests.support.models.transformers_for_tests import Inputs, make_transformer
from tests.support.settings import with_debug

MASK = {"source": "window", "block_q": 16, "block_k": 16}
SIZE = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 1, "output_type": "latent"}
SIZE |= {"max_sequence_length": 16}


def _made(pipe: Any, seed: int = 0, prompt: str = "the sea", **more: Any) -> torch.Tensor:
    return pipe(prompt=prompt, generator=torch.Generator().manual_seed(seed), **SIZE | more).frames


def differing_calls(rank: int, world: int, folder: str, debug: bool) -> dict[str, str]:
    """What each kind of call says whose ranks differ, after one that went well and before another that must."""
    pipe = load("wan", folder)
    dbsp_diffusers.enable(pipe, with_debug({"mask": MASK}, debug))
    expected = _made(pipe)
    odd = rank == world - 1
    calls: dict[str, Callable[[], Any]] = {
        "seed": lambda: _made(pipe, seed=rank),
        "prompt": lambda: _made(pipe, prompt="a red ball" if odd else "the sea"),
        "longer prompt": lambda: _made(pipe, max_sequence_length=16 + 8 * odd),
        "size": lambda: _made(pipe, width=96 + 16 * odd),
        "steps": lambda: _made(pipe, num_inference_steps=1 + odd),
        "guidance": lambda: _made(pipe, guidance_scale=1.0 + 4 * odd),
        "generator": lambda: _made(pipe) if odd else pipe(prompt="the sea", **SIZE),
    }
    said = {}
    for kind, call in calls.items():
        said[kind] = _said(call)
        assert torch.equal(_made(pipe), expected), f"usable after {kind}"
    dbsp_diffusers.disable(pipe)
    return said


def _said(call: Callable[[], Any]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return "nothing"


def failing_on_one(rank: int, world: int, folder: str, debug: bool) -> tuple[list[str], float]:
    """A server's loop: the last rank's text encoder fails in the first request, and it goes on with the next.

    returns: what each request said until all ranks are at the last; its difference from the right video
    """
    pipe = load("wan", folder)
    dbsp_diffusers.enable(pipe, with_debug({"mask": MASK}, debug))
    expected = _made(pipe, seed=9)
    encode, said = pipe.encode_prompt, []

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("out of memory on one rank")

    requests = [0, 1, 2]
    if rank == world - 1:
        pipe.encode_prompt = fail
        said.append(_said(lambda: _made(pipe, seed=requests.pop(0))))
        pipe.encode_prompt = encode
    for _ in range(2):
        seed = requests.pop(0)
        said.append(_said(lambda seed=seed: _made(pipe, seed=seed)))  # type: ignore[misc]
    found = difference(_made(pipe, seed=9), expected)
    dbsp_diffusers.disable(pipe)
    return said, found


def second_pipeline(rank: int, world: int, folder: str) -> tuple[str, float]:
    """Made from the parts of an enabled one: (what it says without a generator, difference of it with one)."""
    from diffusers import WanPipeline

    pipe = load("wan", folder)
    expected = _made(pipe)
    dbsp_diffusers.enable(pipe, {"mask": {"source": "dense", "block_q": 16, "block_k": 16}})
    other = WanPipeline(**pipe.components)
    other.set_progress_bar_config(disable=True)
    _made(pipe)
    torch.manual_seed(1000 * rank)
    said = _said(lambda: other(prompt="the sea", **SIZE))
    found = difference(_made(other), expected)
    dbsp_diffusers.disable(pipe)
    return said, found


def passes_alone(rank: int, world: int) -> list[str]:
    """A transformer without a pipeline, in loops of the user's own: what each pass says."""
    transformer, said = make_transformer("wan"), []
    dbsp_diffusers.enable(transformer, {"mask": MASK})
    checks = attached_to(transformer).generations.checks

    inputs = Inputs.random("wan", (3, 5, 7), 1, 7).arguments

    def step(timestep: int, scale: int) -> None:
        latents = inputs["hidden_states"] * scale
        transformer(**inputs | {"hidden_states": latents, "timestep": torch.tensor([timestep])})

    with torch.no_grad():
        for timestep, scale in ((900, 1), (500, 1), (900, 1 - 2 * rank), (900, 1), (400, 1)):
            said.append(_said(lambda timestep=timestep, scale=scale: step(timestep, scale)))  # type: ignore[misc]
    dbsp_diffusers.disable(transformer)
    return [*said, str(checks.calls)]


def rejected_on_one(rank: int, world: int, fault: str) -> str:
    """What `enable` says where it cannot be done on the last rank alone, and whether it can be done afterwards."""
    transformer, options = make_transformer("wan"), {}
    odd = rank == world - 1
    model: Any = transformer
    if odd and fault == "adapted":
        from peft import LoraConfig

        model = make_transformer("wan")
        model.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    elif odd and fault == "spread":
        model = make_transformer("wan")
        for gpu, block in enumerate(model.blocks):  # as accelerate leaves a model with a device map
            block._hf_hook = SimpleNamespace(execution_device=gpu)
    elif odd and fault == "class":
        model = torch.nn.Linear(2, 2)
    elif odd and fault == "none":
        model = object()
    elif odd and fault == "strategy":
        options["strategy"] = "U2"
    elif odd and fault == "enabled":
        vars(transformer)["_is_parallelized"] = True
    said = _said(lambda: dbsp_diffusers.enable(model, {"mask": MASK}, **options))
    vars(transformer).pop("_is_parallelized", None)
    dbsp_diffusers.enable(transformer, {"mask": MASK})
    dbsp_diffusers.disable(transformer)
    return said
