"""Ranks compare, before the first attention of a generation, which call they are at and what they were given."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dbsp_diffusers
from tests.support.models.tiny_pipelines import latents, load
from tests.support.models.tiny_transformers import make_tiny_transformer
from tests.support.outcomes import said
from tests.support.settings import with_debug

MASK = {"source": "window", "block_q": 16, "block_k": 16}
LATENTS_DIFFER = "UserError: the latents that a generation begins with differ on rank(s) [1]"
DIFFERENCES = {
    "seed": LATENTS_DIFFER,
    "prompt": "UserError: the text or another condition differs on rank(s) [1]",
    "longer prompt": "UserError: the text or another condition differs in length on rank(s) [1]",
    "size": "UserError: the size of the video differs on rank(s) [1]",
    "steps": "UserError: the denoising steps, timestep or guidance differ on rank(s) [1]",
    "guidance": "UserError: the denoising steps, timestep or guidance differ on rank(s) [1]",
    "generator": "UserError: some ranks passed a generator and others did not",
}


def made(pipe: Any, seed: int | None = 0, **more: Any) -> torch.Tensor:
    return latents(pipe, **{"seed": seed, "num_inference_steps": 1} | more)


def differing_calls(rank: int, world: int, folder: str) -> None:
    """Makes calls in which ranks differ, each after one that went well and before another that must."""
    pipe, odd = load("wan", folder), rank == world - 1
    dbsp_diffusers.enable(pipe, with_debug({"mask": MASK}))
    expected = made(pipe)
    calls: dict[str, dict[str, Any]] = {
        "seed": {"seed": rank},
        "prompt": {"prompt": "a red ball"} if odd else {},
        "longer prompt": {"max_sequence_length": 16 + 8 * odd},
        "size": {"width": 96 + 16 * odd},
        "steps": {"num_inference_steps": 1 + odd},
        "guidance": {"guidance_scale": 1.0 + 4 * odd},
        "generator": {"seed": 0 if odd else None},
    }
    for kind, message in DIFFERENCES.items():
        answer = said(lambda kind=kind: made(pipe, **calls[kind]))  # type: ignore[misc]
        assert answer.startswith(message), (kind, answer)
        assert torch.equal(made(pipe), expected), f"usable after {kind}"
    dbsp_diffusers.disable(pipe)


def test_calls_that_differ_raise_on_all_ranks_and_the_next_one_is_right(pool, folder):
    pool(2).run(differing_calls, folder)


def failing_on_one(rank: int, world: int, folder: str) -> list[str]:
    """Runs a server's loop: the last rank's text encoder fails in the first request, and it goes on with the next.

    Returns the answer to each request until all ranks are at the last, which must give the right video.
    """
    pipe = load("wan", folder)
    dbsp_diffusers.enable(pipe, {"mask": MASK})
    expected = made(pipe, seed=9)
    encode, answers = pipe.encode_prompt, []

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("out of memory on one rank")

    requests = [0, 1, 2]
    if rank == world - 1:
        pipe.encode_prompt = fail
        answers.append(said(lambda: made(pipe, seed=requests.pop(0))))
        pipe.encode_prompt = encode
    for _ in range(2):
        seed = requests.pop(0)
        answers.append(said(lambda seed=seed: made(pipe, seed=seed)))  # type: ignore[misc]
    assert torch.equal(made(pipe, seed=9), expected)
    dbsp_diffusers.disable(pipe)
    return answers


def test_call_after_a_failed_one_mixes_no_requests(pool, folder):
    others, odd = pool(2).run(failing_on_one, folder)
    mixed = "UserError: rank(s) [1] are at a different pipeline call"
    assert odd[0] == "ValueError: out of memory on one rank"
    assert others[0].startswith(mixed)
    assert odd[1].startswith(mixed)
    assert others[1].startswith(LATENTS_DIFFER), "requests 1 and 2, at calls of one number again"
    assert odd[2].startswith(LATENTS_DIFFER)


def _adapted() -> Any:
    from peft import LoraConfig

    model = make_tiny_transformer("wan")
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))
    return model


def _spread() -> Any:
    model = make_tiny_transformer("wan")
    for gpu, block in enumerate(model.blocks):  # as accelerate leaves a model with a device map
        block._hf_hook = SimpleNamespace(execution_device=gpu)
    return model


ODD: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "adapted": (
        _adapted,
        {},
        "the transformer's weights differ in name, shape, dtype, adapters or branches on",
    ),
    "spread": (_spread, {}, "got transformers on cuda:0, cuda:1 (a device map?)"),
    "class": (lambda: torch.nn.Linear(2, 2), {}, "does not know Linear"),
    "configuration": (lambda: make_tiny_transformer("wan"), {"config": {"planer": "dbsp"}}, "did you mean 'planner'?"),
    "another configuration": (
        lambda: make_tiny_transformer("wan"),
        {"config": {"mask": MASK | {"block_q": 32}}},
        "the settings differ on rank(s) [1]",
    ),
}
"""What the last rank is given: a model and arguments; and what `enable` says then."""


def rejected_on_one(rank: int, world: int, fault: str) -> str:
    """Returns the answer of `enable` if it cannot be done on the last rank alone; it can be done afterwards."""
    transformer = make_tiny_transformer("wan")
    make, options, _ = ODD[fault] if rank == world - 1 else (lambda: transformer, {}, "")
    answer = said(lambda: dbsp_diffusers.enable(make(), **{"config": {"mask": MASK}} | options))
    dbsp_diffusers.enable(transformer, {"mask": MASK})
    dbsp_diffusers.disable(transformer)
    return answer


@pytest.mark.parametrize("fault", ODD)
def test_enable_that_is_rejected_on_one_rank_is_rejected_on_all(pool, fault):
    for answer in pool(2).run(rejected_on_one, fault):
        assert answer.startswith("UserError: ")
        assert "rank(s) [1]" in answer
        assert ODD[fault][2] in answer


BY_STEP = {"source": "callable", "function": "tests.support.user_masks:band_noting_moments", "depends_on": "step"}
BY_STEP |= {"block_q": 8, "block_k": 8}


def dense_passes(session: Any) -> list[bool]:
    """Returns a list that gets, in each pass from now on, whether its attention is dense."""
    provider, dense = session._provider, []
    begin = provider.begin

    def watch(*arguments: Any) -> None:
        begin(*arguments)
        dense.append(provider._is_dense(0))

    provider.begin = watch
    return dense


@pytest.mark.parametrize(("strength", "steps"), [(1.0, 10), (0.5, 5)])
def test_last_steps_are_dense_when_strength_leaves_out_the_first(folder, strength, steps):
    from diffusers import WanVideoToVideoPipeline

    parts = load("wan", folder).components
    names = ("tokenizer", "text_encoder", "transformer", "vae", "scheduler")
    pipe = WanVideoToVideoPipeline(**{name: parts[name] for name in names})
    pipe.set_progress_bar_config(disable=True)
    dense = dense_passes(dbsp_diffusers.enable(pipe, {"mask": BY_STEP, "dense_schedule": {"last_steps": 2}}))
    size = {"latents": torch.randn(1, parts["transformer"].config.in_channels, 3, 8, 8), "height": 64, "width": 64}
    pipe(prompt="a", num_inference_steps=10, strength=strength, guidance_scale=1.0, output_type="latent", **size)
    assert dense == [step >= steps - 2 for step in range(steps)]


def test_steps_of_another_pipelines_scheduler_are_not_guessed(folder):
    """Runs a second pipeline, with a scheduler of its own or the first one's, on an enabled one's transformer."""
    from diffusers import UniPCMultistepScheduler, WanPipeline

    pipe = load("wan", folder)
    own = UniPCMultistepScheduler.from_config(pipe.scheduler.config)
    other, sharing = (WanPipeline(**pipe.components | {"scheduler": one}) for one in (own, pipe.scheduler))
    dense = dense_passes(dbsp_diffusers.enable(pipe, {"mask": BY_STEP, "dense_schedule": {"last_steps": 1}}))
    made(pipe, num_inference_steps=3)
    call = {"num_inference_steps": 4, "guidance_scale": 1.0}
    assert "last_steps needs the number of denoising steps" in said(lambda: made(other, **call))
    made(sharing, **call)
    assert dense[-4:] == [False, False, False, True]
    dbsp_diffusers.disable(pipe)
