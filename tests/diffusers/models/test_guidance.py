"""Guidance parallelism: two halves of the ranks compute a step's two CFG passes, as one process does."""

from __future__ import annotations

from unittest import mock

import pytest

from dbsp_diffusers.sharding.halves import Halves
from tests.diffusers.models.guidance_cases import (
    Guided,
    chosen_automatically,
    failing_in_one_half,
    failing_on_processes,
    rejected_by_enable,
    rejected_in_a_pass,
    run_guided,
)

TOLERANCE = 1e-5
MILD = (("guidance_scale", 2.0),)
"""Guidance multiplies rounding by its scale."""
CASES = {
    "static masks": (2, Guided()),
    "predicted masks": (4, Guided(mask="sparge", strategy="U1R2")),
    "strategy auto": (4, Guided(strategy="auto")),
    "two transformers": (4, Guided(mask="sparge", two=True)),
    "control video": (2, Guided("WanVACEPipeline")),
    "sliced outputs": (2, Guided("QwenImagePipeline", "sparge")),
    "one batch": (4, Guided("CogVideoXPipeline", "sparge", "U1R2", call=MILD)),
}


@pytest.mark.parametrize("name", CASES)
def test_halves_equal_one_process(threads, name):
    world, guided = CASES[name]
    for found in threads(world).run(run_guided, guided):
        assert max(found.errors) <= TOLERANCE
        assert found.effect > 100 * TOLERANCE, "the mask must matter"
        assert found.left == 0
        assert found.restored, "disable left something behind"
        assert (found.group, found.calls) == (world // 2, 1), "each half has one pass a step"


def test_first_block_cache_skips_what_one_process_skips(threads):
    for found in threads(4).run(run_guided, Guided(cache=10.0, strategy="U1R2")):
        assert max(found.errors) <= TOLERANCE
        assert found.calls == pytest.approx((1 + 1 / 2 + 1 / 2) / 3), "of two layers, after the first step"


def test_pass_without_a_second_one_is_right_and_logged(threads, caplog):
    caplog.set_level("WARNING", "dbsp")
    guided = Guided("QwenImagePipeline", "sparge", call=(("true_cfg_scale", 1.0),))
    for found in threads(4).run(run_guided, guided):
        assert max(found.errors) <= TOLERANCE
        assert (found.group, found.calls) == (2, 1)
    assert [one.getMessage() for one in caplog.records if "without a second one" in one.getMessage()]


def test_outputs_of_one_half_alone_are_another_video(threads):
    """A negative control: without the exchange both passes of guidance are one."""
    with mock.patch.object(Halves, "exchange", lambda halves, mine: (mine, mine)):
        for found in threads(2).run(run_guided, Guided()):
            assert min(found.errors) > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("name", "ranks", "part"),
    [
        ("odd", 3, "guidance=True halves the ranks, and there are 3"),
        ("class", 2, "the two CFG passes of HunyuanVideo15Transformer3DModel"),
        ("value", 2, "guidance must be True, False or \"auto\", got 'both'"),
        ("mesh", 2, "a mesh says how all of them are used"),
        ("auto", 2, "leave strategy out"),
        ("on one rank", 2, "differ"),
        ("on one rank", 4, "differ"),
        ("another kind on one rank", 4, "differs on rank(s) [3]"),
    ],
)
def test_enable_rejects_on_all_ranks(threads, name, ranks, part):
    for answer in threads(ranks).run(rejected_by_enable, name):
        assert part in answer


@pytest.mark.parametrize(("name", "part"), [("gradients", "torch.no_grad()"), ("cache", "FBC")])
def test_passes_that_halves_cannot_share_are_rejected(threads, name, part):
    for answer in threads(2).run(rejected_in_a_pass, name):
        assert part in answer


def test_error_in_one_half_is_raised_in_both(threads):
    for answer, off in threads(4).run(failing_in_one_half):
        assert "rank(s) [2, 3]: no mask" in answer
        assert off <= TOLERANCE


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({}, 2),
        ({"strategy": "auto", "machine": "h100"}, 2),
        ({"machine": "h100", "generate": {"height": 480, "width": 832, "num_frames": 81}}, 2),
        ({"generate": {"guidance_scale": 1.0}}, 4),
    ],
    ids=["rule", "no size", "predicted", "no guidance"],
)
def test_auto_takes_halves_if_they_are_faster(threads, config, size):
    assert threads(4).run(chosen_automatically, config) == [size] * 4


def test_auto_needs_an_even_number_of_ranks(threads):
    assert threads(3).run(chosen_automatically, {}) == [3] * 3


def test_halves_on_processes(pool):
    for found, (answer, off) in pool(4).run(failing_on_processes):
        assert max(found.errors) <= TOLERANCE
        assert found.restored
        assert "no mask" in answer
        assert off <= TOLERANCE
