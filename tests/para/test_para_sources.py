"""Every source of patterns in whole models over 3 and 4 ranks: equal to one process with the same mask."""

from __future__ import annotations

import pytest

from tests.para.para_cases import ParaCase, run_para_case

TOLERANCE = 1e-5
BLOCKS = {"block_q": 16, "block_k": 8}
SOURCES = {
    "tiles": {"source": "window", "tile": [1, 3, 4], "window": [1, 1, 3], "block_q": 12, "block_k": 12},
    "tiles cut by blocks": {"source": "window", "tile": [2, 3, 4], "window": [1, 1, 1], **BLOCKS},
    "radial": {"source": "radial", "width": 0.4, "sink_frames": 0, **BLOCKS},
    "svg": {"source": "svg", "frames": 1, "bandwidth": 0.2, "temporal_heads": [0, 1, 4], **BLOCKS},
    "callable": {
        "source": "callable",
        "function": "tests.support.user_masks:band",
        "depends_on": "step",
        "token_orders": ["thw", "hwt", "tile:2x2x2", "wht", "thw", "htw"],
        **BLOCKS,
    },
}


@pytest.mark.usefixtures("debug")
@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize(("model", "strategy"), [("wan", "U1R3"), ("cogvideox", "U2R2"), ("wan", "U1R4")])
def test_equals_one_process(pool, model, strategy, name):
    config = {"mask": SOURCES[name], "strategy": strategy}
    world = int(strategy[1]) * int(strategy[3])
    for difference, from_dense in pool(world).run(run_para_case, ParaCase(model, (3, 5, 7), config)):
        assert difference <= TOLERANCE
        assert from_dense > 100 * TOLERANCE, "the mask must matter"
