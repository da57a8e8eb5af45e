"""dbsp_diffusers by itself: enabled, undone without a trace, and what sessions report."""

from __future__ import annotations

import pytest
import torch

import dbsp_diffusers
import dbsp_para
from dbsp_core.utils.errors import UserError
from tests.core.comm.lifetimes import left_alive
from tests.diffusers.enable_cases import (
    CONFIG,
    current_gpu,
    enabled_in_a_second_life,
    enabled_pipeline,
    exchanges_before_the_first_attention,
    run_pipeline,
    run_repeated_timesteps,
    run_transformer,
    unsupported,
)
from tests.support.models.transformers_for_tests import make_transformer

TOLERANCE = 1e-5


def on_ranks(pool, world, function, *arguments):
    return pool(world).run(function, *arguments) if world > 1 else [function(0, 1, *arguments)]


@pytest.mark.parametrize(("world", "strategy"), [(1, None), (2, None), (2, "U1R2")])
def test_transformer_equals_one_process(pool, world, strategy):
    for from_single, from_dense, statistics in on_ranks(pool, world, run_transformer, strategy):
        assert from_single <= TOLERANCE
        assert from_dense > 100 * TOLERANCE, "the mask must matter"
        assert (statistics["calls"], statistics["plans"]) == (2, 2)
        assert 1.0 <= statistics["mean_rho"] <= statistics["worst_rho"] < 2.0


@pytest.mark.parametrize("world", [1, 2])
def test_pipeline_equals_one_process(pool, folder, world):
    results = on_ranks(pool, world, run_pipeline, folder)
    for from_single, from_dense, _ in results:
        assert from_single <= TOLERANCE
        assert from_dense > 100 * TOLERANCE, "the mask must matter"
    assert len({total for *_, total in results}) == 1, "ranks must share their noise"


def test_repeated_timestep_is_another_step_and_not_a_cfg_pass(pool, folder):
    for from_single, one_process, here in pool(2).run(run_repeated_timesteps, folder, 3):
        assert from_single <= TOLERANCE
        assert one_process == here == [(step, branch) for step in range(5) for branch in range(2)]


def test_each_rank_has_its_own_gpu_as_the_current_one(pool):
    assert pool(2).run(current_gpu) == [0, 1]


@pytest.mark.parametrize(
    "mask", [{"source": "window"}, {"source": "synthetic", "density": 0.3}], ids=["static", "step"]
)
def test_ranks_compare_three_times_from_enable_to_the_first_attention(pool, folder, mask):
    """When db-SP is enabled, when the pipeline is called, and at the attention; then twice a call."""
    settings = {"mask": mask | {"block_q": 16, "block_k": 16}}
    for first, second in pool(2).run(exchanges_before_the_first_attention, folder, settings):
        assert [name for name in first if name != "broadcast"] == [
            "enable",
            "all_gather",
            "all_gather",
            "all_gather",
            "q",
        ]
        assert [name for name in second if name != "broadcast"] == ["call", "all_gather", "all_gather", "q"]
        assert first.count("broadcast") == second.count("broadcast") == 4, "two headers, random numbers, inputs"


def test_transformer_compiled_after_enable_has_its_session():
    transformer = make_transformer("wan")
    session = dbsp_diffusers.enable(transformer, CONFIG)
    assert session.statistics() == {"calls": 0, "plans": 0, "mean_rho": 1.0, "worst_rho": 1.0}
    compiled = torch.compile(transformer)
    assert dbsp_diffusers.session_of(compiled) is session
    dbsp_diffusers.disable(compiled)
    assert dbsp_diffusers.session_of(transformer) is None
    session = dbsp_diffusers.enable(compiled, CONFIG)
    assert dbsp_diffusers.session_of(transformer) is session
    dbsp_diffusers.disable(compiled)


def test_object_that_is_not_a_pipeline_is_rejected():
    with pytest.raises(ValueError, match="int has none"):
        dbsp_diffusers.enable(3)


@pytest.mark.parametrize("enable", [dbsp_diffusers.enable, dbsp_para.parallelize_transformer])
def test_ranks_that_have_not_met_are_rejected(monkeypatch, enable):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    transformer = make_transformer("wan")
    with pytest.raises(UserError, match=r"torchrun started 8 processes, but torch.distributed is not initialised"):
        enable(transformer, config=CONFIG)
    assert dbsp_diffusers.session_of(transformer) is None


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"mask": {"source": "window", "window": [99, 99, 99]}}, "mask window left nothing out, density 1.000"),
        (
            {"mask": {"source": "window", "window": [1, 1, 1]}, "dense_schedule": {"first_steps": 99}},
            "dense_schedule makes all 2 steps dense (first_steps 99, last_steps 0): nothing will be gained",
        ),
        ({"mask": {"source": "window", "window": [1, 1, 1]}, "dense_schedule": {"first_steps": 1}}, None),
        ({"mask": {"source": "dense"}}, None),
    ],
)
def test_call_that_gains_nothing_is_logged(folder, capfd, config, said):
    import diffusers

    blocks = {} if config["mask"]["source"] == "dense" else {"block_q": 8, "block_k": 8}
    pipe = diffusers.WanPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    dbsp_diffusers.enable(pipe, {**config, "mask": config["mask"] | blocks})
    size = {"height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 2, "guidance_scale": 1.0}
    pipe("a", output_type="latent", **size)
    lines = [line for line in capfd.readouterr().err.splitlines() if "gained" in line]
    assert len(lines) == (said is not None), lines
    assert said is None or said in lines[0]


@pytest.mark.parametrize(
    ("framework", "mask"),
    [("diffusers", {"source": "sparge", "cdf": 0.6}), ("para", {"source": "window"})],
    ids=["diffusers", "para"],
)
def test_enabled_pipeline_keeps_no_destroyed_group_alive(pool, tmp_path, folder, framework, mask):
    """Nobody has to disable it first: a group that is left when Python ends may abort it."""
    mask = mask | {"block_q": 16, "block_k": 16}
    for there, left in pool(2).run(left_alive, str(tmp_path), enabled_pipeline, framework, folder, mask):
        assert (there, left) == (2, []), "one to attend in and one to agree in"


def test_caught_rejection_keeps_no_destroyed_group_alive(pool, tmp_path):
    for _, left in pool(2).run(left_alive, str(tmp_path), unsupported):
        assert left == []


def test_transformer_of_a_destroyed_group_is_an_error_until_enabled_anew(pool):
    for said, from_single in pool(2).run(enabled_in_a_second_life):
        assert said.startswith("the process group that this was made for is destroyed; ")
        assert from_single <= TOLERANCE
