"""LightX2V with attention "dbsp": its own Wan on CPU ranks equals one process of it.

Runs in an environment of its own: `scripts/engines test`.
"""

from __future__ import annotations

import importlib.util

import pytest

if importlib.util.find_spec("lightx2v") is None:
    pytest.skip("run scripts/engines test", allow_module_level=True)
from dbsp_engines.lightx2v import EXPECTED
from scripts.checks.engines.runs import Case, run
from tests.engines.cases import (
    EVEN,
    KNOWN,
    PREDICTED,
    SPLITS,
    UNEQUAL,
    EveryEngine,
    assert_exact,
    own_masks,
)

ENGINE = "lightx2v"
IMAGES = ((1, 5, 15), (1, 6, 12))
H3_SIZES = ((37, 2, 2), (37, 2, 3))
SPARSE = "sparge:cdf=0.35,similarity=-1,block_q=16,block_k=8"


class TestEveryEngine(EveryEngine):
    engine, expected, without = ENGINE, EXPECTED, {"DBSP_LEAVE_OUT": "1"}


@pytest.mark.parametrize(("ulysses", "ring"), SPLITS)
def test_wan22_and_models_of_four_steps_with_masks_of_their_own(ulysses, ring, tmp_path):
    """Both experts of Wan2.2, each with its mask, and distilled; Wan2.1 distilled."""
    own = own_masks(tmp_path)
    cases = (
        Case(3, (UNEQUAL,), own, pair=True, passes=2),
        Case(5, (UNEQUAL, EVEN), own, pair=True, model="distilled"),
        Case(3, (UNEQUAL,), PREDICTED, model="distilled"),
    )
    assert_exact(cases, run(ENGINE, ulysses, ring, *cases))


@pytest.mark.parametrize(("ulysses", "ring"), SPLITS)
def test_videos_of_other_models(ulysses, ring):
    """MiniMax-H3, with text that four ranks don't all hold whole; HunyuanVideo-1.5; LTX-2, whose passes leave out a
    block's attention or audio, and whose audio attends to the video without its padding."""
    cases = (
        Case(3, H3_SIZES, KNOWN, model="minimax_h3"),
        Case(5, H3_SIZES[1:], SPARSE, model="minimax_h3"),
        Case(3, (UNEQUAL, EVEN), KNOWN, model="hunyuan_video_15"),
        Case(5, (UNEQUAL,), SPARSE, passes=2, model="hunyuan_video_15"),
        Case(3, (UNEQUAL, EVEN), KNOWN, passes=4, model="ltx2"),
        Case(5, (UNEQUAL,), SPARSE, passes=4, model="ltx2"),
    )
    assert_exact(cases, run(ENGINE, ulysses, ring, *cases))


@pytest.mark.parametrize(("ulysses", "ring"), SPLITS)
def test_images(ulysses, ring):
    """Text whole on every rank, after or before the image; an image that is edited; padding of Z-Image, which is
    attended to, and whose heads LightX2V lets no number of ranks cut unevenly."""
    cases = (
        Case(3, IMAGES, KNOWN, model="qwen_image"),
        Case(5, IMAGES, SPARSE, passes=2, model="qwen_image_edit"),
        Case(5, IMAGES, SPARSE, model="flux2"),
        Case(3, IMAGES, KNOWN, passes=2, model="longcat_image"),
        Case(4, IMAGES, SPARSE, passes=2, model="z_image"),
    )
    assert_exact(cases, run(ENGINE, ulysses, ring, *cases))


def test_8_bits_are_db_sps_own(tmp_path):
    """Those of LightX2V's two interfaces are rejected with the setting that sends 8 bits both ways, which is near."""
    both_ways = tmp_path / "int8.yaml"
    both_ways.write_text(f"mask: {KNOWN}\nprecision: {{qkv: int8, out: int8}}\n", encoding="utf-8")
    *rejected, found = run(
        ENGINE,
        2,
        1,
        Case(3, (EVEN,), KNOWN, options={"seq_p_quant_scheme": "fp8"}),
        Case(3, IMAGES[:1], KNOWN, options={"seq_p_fp8_comm": True}, model="flux2"),
        Case(3, (EVEN,), str(both_ways)),
    )
    for one in rejected:
        assert "seq_p_quant_scheme fp8 (or seq_p_fp8_comm)" in one["rejected"]
        assert "set precision: {qkv: int8, out: int8} in db-SP's configuration" in one["rejected"]
    assert 1e-4 < found["error"] < found["dense"] / 10


def test_cfg_passes_on_ranks_of_their_own():
    case = Case(3, (UNEQUAL,), PREDICTED, passes=2, cfg_parallel=True)
    assert_exact([case], run(ENGINE, 4, 1, case))


def test_compiled_too():
    case = Case(3, (UNEQUAL,), PREDICTED, compiled=True)
    assert_exact([case], run(ENGINE, 1, 2, case))


def test_step_caches_skip_the_same_steps_as_in_one_process_or_are_rejected():
    cases = [Case(3, (UNEQUAL,), KNOWN, passes=2, cache=cache) for cache in ("Tea", "Mag")]
    found = run(ENGINE, 1, 2, *cases)
    assert_exact(cases, found)
    assert [one["skipped"] for one in found] == [2, 4], "one step of two passes, two steps of two passes"
