"""Modelled times: their parts add up, balance and GPUs make them shorter, nodes longer."""

from __future__ import annotations

import numpy as np

from dbsp_core import BlockGrid, BlockMask, Strategy
from dbsp_core.cost.machine import load_hardware
from dbsp_core.models.table import MODEL_SPECS
from scripts.reproduce.simulate import simulate


def tiny_mask(heads=40, blocks=48, seed=0):
    grid = BlockGrid.uniform(MODEL_SPECS["wan2.1-t2v-14b"].tokens, 75600 // blocks)
    odds = np.linspace(0.1, 0.9, heads)[:, None, None]
    return BlockMask(np.random.default_rng(seed).random((heads, grid.nq, grid.nk)) < odds, grid)


class TestSimulate:
    def run(self, gpus, **options):
        model = MODEL_SPECS["wan2.1-t2v-14b"]
        return simulate(model, [tiny_mask()], load_hardware("a800"), gpus, ["contiguous", "dbsp"], **options)

    def test_balance_is_what_makes_it_faster(self):
        rows = {(row.strategy, row.planner): row for row in self.run([8])}
        assert len(rows) == 8
        for strategy in Strategy.all_for(8):
            before, after = rows[str(strategy), "contiguous"], rows[str(strategy), "dbsp"]
            assert after.rho < before.rho == before.rho_before
            assert after.attention_speedup == before.attention_s / after.attention_s
            if before.rho > 1.1:  # else packing keys for each of their readers costs more than balance gains
                assert 1 < after.speedup < after.attention_speedup
            assert (before.speedup, before.label) == (1.0, "modelled")
            assert after.end_to_end_s == after.attention_s + after.other_s

    def test_more_gpus_are_faster_and_more_nodes_slower(self):
        four, eight = (self.run([n], strategy=f"U{n}R1")[1] for n in (4, 8))
        assert eight.end_to_end_s < four.end_to_end_s
        apart = self.run([8], strategy="U8R1", node_size=4)[1]
        assert apart.exchange_s > eight.exchange_s
        assert apart.other_s == eight.other_s
