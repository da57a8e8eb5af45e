"""dbsp_xdit next to xfuser's other kinds of parallelism, on more ranks, and under torch.compile."""

from __future__ import annotations

import pytest

from dbsp_cli.tiny_models import make_tiny
from tests.xdit.xdit_cases import XditCase, run_xdit_case, start_xfuser
from tests.xdit.xdit_parallel_cases import run_compiled, run_data_parallel, run_image_to_video

TOLERANCE = 1e-5
MASK = {"source": "synthetic", "density": 0.3, "block_q": 16, "block_k": 8}
CDF = {"source": "sparge", "cdf": 0.6, "similarity": 0.0, "block_q": 16, "block_k": 8}
BY_BRANCH = {
    "source": "callable",
    "function": "tests.support.user_masks:band",
    "depends_on": "step",
    "block_q": 8,
    "block_k": 8,
}


@pytest.mark.usefixtures("debug")
def test_wan_branches_on_groups_of_their_own_keep_their_masks(pool, tmp_path):
    world = 4
    folder = str(make_tiny("wan", tmp_path / "wan"))
    pool(world).run(start_xfuser, 2)
    config = {"mask": BY_BRANCH, "strategy": f"U1R{world // 2}"}
    for difference, from_swapped in pool(world).run(run_image_to_video, folder, config):
        assert difference <= TOLERANCE
        assert from_swapped > 10 * TOLERANCE, "which branch has which mask must matter"


@pytest.mark.usefixtures("debug")
def test_data_parallel_groups_do_not_wait_for_each_other(pool):
    workers = pool(4)
    workers.run(start_xfuser, 1, 2)
    for mask, model in ((MASK, "wan"), (CDF, "cogvideox")):
        case = XditCase((3, 5, 7), {"mask": mask, "strategy": "U1R2"}, model=model)
        results = workers.run(run_data_parallel, case, 2)
        assert [len(each) for each in results] == [1, 1, 2, 2]
        assert all(difference <= TOLERANCE for each in results for difference, _ in each), results
    workers.run(start_xfuser)


@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize(("world", "strategies"), [(6, ("U3R2",)), pytest.param(8, ("U8R1",), marks=pytest.mark.long)])
def test_six_and_eight_ranks(pool, world, strategies):
    """6 heads don't divide by 8, 105 tokens by neither."""
    workers = pool(world)
    workers.run(start_xfuser)
    for strategy in strategies:
        for model in ("wan", "cogvideox1.0"):
            config = {"mask": MASK | {"drift": 0.05}, "strategy": strategy}
            for difference, from_dense in workers.run(run_xdit_case, XditCase((3, 5, 7), config, 2, model)):
                assert difference <= TOLERANCE, (strategy, model)
                assert from_dense > 100 * TOLERANCE, "the mask must matter"


@pytest.mark.parametrize(
    ("model", "mask"),
    [("wan", CDF), ("cogvideox", MASK)],
    ids=["wan", "cogvideox"],
)
@pytest.mark.long
def test_a_compiled_transformer_gives_the_same_with_few_graphs(pool, model, mask):
    workers = pool(2)
    workers.run(start_xfuser)
    graphs = {}
    for layers in (1, 2):
        for difference, runs, recompiled in workers.run(
            run_compiled, model, layers, {"mask": mask, "strategy": "U1R2"}
        ):
            assert difference <= 1e-6
            assert recompiled == 0
            graphs[layers] = runs
    assert graphs[2] - graphs[1] <= 2, "before attention and after"
    assert graphs[1] <= 12
