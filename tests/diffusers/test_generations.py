"""Ranks compare, before the first attention of a generation, which call they are at and what they were given."""

from __future__ import annotations

import pytest
import torch

import dbsp_diffusers
from tests.diffusers.generation_cases import (
    differing_calls,
    failing_on_one,
    passes_alone,
    rejected_on_one,
    second_pipeline,
)

TOLERANCE = 1e-5


@pytest.mark.parametrize("debug", [pytest.param(False, marks=pytest.mark.long), True])
def test_calls_that_differ_raise_on_all_ranks_and_the_next_one_is_right(pool, folder, debug):
    answers = pool(2).run(differing_calls, folder, debug)
    assert answers[0] == answers[1], "all ranks say the same"
    expected = {
        "seed": "the latents that a generation begins with differ on rank(s) [1]",
        "prompt": "the text or another condition differs on rank(s) [1]",
        "longer prompt": "the text or another condition differs in length on rank(s) [1]",
        "size": "the size of the video differs on rank(s) [1]",
        "steps": "the denoising steps, timestep or guidance differ on rank(s) [1]",
        "guidance": "the denoising steps, timestep or guidance differ on rank(s) [1]",
        "generator": "some ranks were given a generator and others not",
    }
    assert answers[0].keys() == expected.keys()
    for kind, text in expected.items():
        assert answers[0][kind].startswith(text), (kind, answers[0][kind])


@pytest.mark.parametrize("debug", [False, pytest.param(True, marks=pytest.mark.long)])
def test_call_after_a_failed_one_mixes_no_requests(pool, folder, debug):
    (others, _), (odd, _) = answers = pool(2).run(failing_on_one, folder, debug)
    mixed = "the ranks are not at the same call: rank(s) [1] have begun another number of them"
    assert odd[0] == "out of memory on one rank"
    assert others[0].startswith(mixed)
    assert odd[1].startswith(mixed)
    assert others[1].startswith("the latents"), "requests 1 and 2, of ranks that agree about the number of calls again"
    assert odd[2].startswith("the latents")
    assert all(difference == 0.0 for _, difference in answers)


def test_pipeline_made_from_an_enabled_one_needs_identical_noise(pool, folder):
    for said, difference in pool(2).run(second_pipeline, folder):
        assert said.startswith("the latents that a generation begins with differ on rank(s) [1]; give all ranks the")
        assert difference <= TOLERANCE


def test_transformer_without_pipeline_is_compared_when_timesteps_rise(pool):
    for first, second, odd, *others, generations in pool(2).run(passes_alone):
        assert odd.startswith("the latents")
        assert {first, second, *others} == {"nothing"}
        assert generations == "2", "the pass after the rejected one repeats its timestep, and is no new generation"


@pytest.mark.parametrize("fault", ["adapted", "spread", "class", "none", "strategy", "enabled"])
def test_enable_that_is_rejected_on_one_rank_is_rejected_on_all(pool, fault):
    words = {
        "adapted": "the transformer's weights differ in name, shape, dtype or adapters on rank(s) [1]",
        "spread": "this one's transformers are on cuda:0, cuda:1 (a device map?)",
        "class": "does not know Linear",
        "none": "object has none",
        "strategy": "U2",
        "enabled": "parallelized already",
    }
    for said in pool(2).run(rejected_on_one, fault):
        assert "rank(s) [1]" in said
        assert words[fault] in said


@pytest.mark.parametrize(("strength", "steps"), [(1.0, 10), (0.8, 8), (0.5, 5)])
def test_last_steps_are_dense_when_strength_leaves_out_the_first(folder, strength, steps):
    from diffusers import WanPipeline, WanVideoToVideoPipeline

    parts = WanPipeline.from_pretrained(folder).components
    names = ("tokenizer", "text_encoder", "transformer", "vae", "scheduler")
    pipe = WanVideoToVideoPipeline(**{name: parts[name] for name in names})
    pipe.set_progress_bar_config(disable=True)
    mask = {"source": "callable", "function": "tests.support.user_masks:band_noting_moments", "depends_on": "step"}
    mask |= {"block_q": 8, "block_k": 8}
    session = dbsp_diffusers.enable(pipe, {"mask": mask, "dense_schedule": {"last_steps": 2}})
    provider, dense = session._mask_provider, []
    begin = provider.begin

    def watch(*arguments):
        begin(*arguments)
        dense.append((provider.moment.step, provider._is_dense(0)))

    provider.begin = watch
    size = {"latents": torch.randn(1, parts["transformer"].config.in_channels, 3, 8, 8), "height": 64, "width": 64}
    pipe(prompt="a", num_inference_steps=10, strength=strength, guidance_scale=1.0, output_type="latent", **size)
    assert dense == [(step, step >= steps - 2) for step in range(steps)]
