"""dbsp_xdit next to xfuser's other kinds of parallelism."""

from __future__ import annotations

import pytest

from dbsp_cli.tiny_models import make_tiny
from tests.xdit.xdit_cases import XditCase, start_xfuser
from tests.xdit.xdit_parallel_cases import run_data_parallel, run_image_to_video

TOLERANCE = 1e-5
CDF = {"source": "sparge", "cdf": 0.6, "similarity": 0.0, "block_q": 16, "block_k": 8}
BY_BRANCH = {
    "source": "callable",
    "function": "tests.support.user_masks:band",
    "depends_on": "step",
    "block_q": 8,
    "block_k": 8,
}


FOUR = pytest.param(4, marks=pytest.mark.long)


@pytest.mark.parametrize("world", [2, FOUR])
@pytest.mark.usefixtures("debug")
def test_cfg_passes_on_groups_of_their_own_keep_their_masks(pool, tmp_path, world):
    folder = str(make_tiny("wan", tmp_path / "wan"))
    pool(world).run(start_xfuser, 2)
    config = {"mask": BY_BRANCH, "strategy": f"U1R{world // 2}"}
    for difference, from_swapped in pool(world).run(run_image_to_video, folder, config):
        assert difference <= TOLERANCE
        assert from_swapped > 10 * TOLERANCE, "which branch has which mask must matter"


@pytest.mark.parametrize("world", [2, FOUR])
@pytest.mark.usefixtures("debug")
def test_data_parallel_groups_do_not_wait_for_each_other(pool, world):
    workers = pool(world)
    workers.run(start_xfuser, 1, 2)
    results = workers.run(run_data_parallel, XditCase((3, 5, 7), {"mask": CDF, "strategy": f"U1R{world // 2}"}), 2)
    workers.run(start_xfuser)
    assert [len(each) for each in results] == [1] * (world // 2) + [2] * (world // 2)
    assert all(difference <= TOLERANCE for each in results for difference, _ in each), results
