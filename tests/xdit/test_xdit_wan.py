"""Wan's whole family in xfuser's own wrappers and pipelines: Wan2.2's two transformers, images, VACE; VSA's gates."""

from __future__ import annotations

import pytest

from dbsp_cli.tiny_models import make_tiny
from tests.support.models.gated_wan import save_gated
from tests.support.models.tiny_transformers import make_tiny_transformer
from tests.xdit.wan_cases import WanCase, run_gated, run_wan_decoding, run_wan_pipeline
from tests.xdit.xdit_cases import start_xfuser

SPARGE = {"source": "sparge", "cdf": 0.5, "similarity": 0.1, "block_q": 16, "block_k": 16}
MASK = {"source": "synthetic", "density": 0.4, "block_q": 16, "block_k": 16}


@pytest.mark.parametrize(
    ("kind", "mask", "image"),
    [
        ("wan2.2", SPARGE, False),
        pytest.param("wan-ti2v", SPARGE, True, marks=pytest.mark.long),
        pytest.param("wan-vace", MASK, False, marks=pytest.mark.long),
    ],
)
def test_pipeline_equals_one_process(pool, tmp_path, kind, mask, image):
    folder = str(make_tiny(kind, tmp_path / kind))
    workers = pool(2)
    workers.run(start_xfuser)
    case = WanCase(kind, folder, {"mask": mask, "strategy": "U1R2"}, image)
    for from_single, from_dense, calls in workers.run(run_wan_pipeline, case):
        assert from_single <= 1e-5
        assert from_dense > 1e-4, "the mask must matter"
        layers, steps, passes = (6 if kind == "wan-vace" else 4), 2, 2
        assert sum(calls) == layers * steps * passes
        assert len(calls) == (2 if kind == "wan2.2" else 1)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_ranks_of_both_cfg_passes_decode_a_video_together(pool, tmp_path, world):
    folder = str(make_tiny("wan-i2v", tmp_path / "wan-i2v"))
    workers = pool(world)
    workers.run(start_xfuser, 2)
    case = WanCase("wan-i2v", folder, {"mask": MASK, "strategy": f"U1R{world // 2}"}, image=True)
    found = workers.run(run_wan_decoding, case)
    workers.run(start_xfuser)
    assert all(equal for equal, _, _ in found)
    alone = found[0][1]
    assert sum(together for _, _, together in found) == alone
    assert max(together for _, _, together in found) < 0.7 * alone


@pytest.mark.parametrize(
    ("by_hand", "config"),
    [(True, {"strategy": "U2R1"}), (False, {"strategy": "U1R2"})],
)
@pytest.mark.usefixtures("debug")
def test_gates_of_a_coarse_branch_equal_one_process(pool, tmp_path, by_hand, config):
    workers = pool(2)
    workers.run(start_xfuser)
    transformer = make_tiny_transformer("wan")
    if by_hand:
        transformer.save_pretrained(tmp_path)
    else:
        save_gated(transformer, tmp_path)
    for found in workers.run(run_gated, str(tmp_path), by_hand, config):
        for difference, from_mask_alone in found:
            assert difference <= 1e-5
            assert from_mask_alone > 1e-3, "the branch must matter"
