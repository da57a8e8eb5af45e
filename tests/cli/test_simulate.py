"""`dbsp simulate`: times add up, multi-node costs more, and mistakes are one line."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from dbsp_cli.commands.simulate import masks_for
from dbsp_cli.simulate import RunConfig, simulate, simulate_layer
from dbsp_core import (
    BlockGrid,
    BlockMask,
    DualBalancedAttention,
    SequenceGroup,
    SequenceLayout,
    Strategy,
    make_plan,
    save_mask,
)
from dbsp_core.cost.hardware import load_hardware, save_hardware
from dbsp_core.cost.latency import AttentionShape, Topology, predict
from dbsp_core.cost.selection import WORTH_A_LOOK, candidates
from dbsp_core.models.lookup import require_model
from dbsp_core.models.spec import ModelSpec
from dbsp_core.models.table import MODEL_SPECS
from dbsp_core.planning.planners import PaperConfig, PlannerConfig
from dbsp_kernels import KERNELS
from dbsp_kernels.registry import returns_lse

COARSE = ("--coarsen", 16)


def test_the_zoo_has_the_paper_models_sizes():
    wan, cog = MODEL_SPECS["wan2.1-t2v-14b"], MODEL_SPECS["cogvideox1.5-5b"]
    assert (wan.tokens, wan.width, wan.calls) == (21 * 3600, 5120, 100)
    assert (cog.tokens, cog.width) == (21 * 4080 + 226, 3072)
    keys = 2 * 40 * 5120**2  # of cross-attention, which are left out
    assert 12e9 < wan.linear_flops / 2 / wan.tokens < 14.3e9 - keys + 1e9
    assert MODEL_SPECS["wan2.1-t2v-1.3b"].tokens == 32760


def test_the_model_s_description_is_of_its_fields():
    described = re.findall(r"^        ([a-z_, ]+): ", ModelSpec.__doc__, re.M)
    names = {name for names in described for name in names.split(", ")}
    assert names
    assert names <= {field.name for field in fields(ModelSpec)}


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
            assert after.attention_speedup == before.attention_s / after.attention_s > 1
            assert 1 < after.speedup < after.attention_speedup
            assert (before.speedup, before.label) == (1.0, "modelled")

    def test_more_gpus_are_faster_and_more_nodes_slower(self):
        four, eight = (self.run([n], strategy=f"U{n}R1")[1] for n in (4, 8))
        assert eight.end_to_end_s < four.end_to_end_s
        apart = self.run([8], strategy="U8R1", node_size=4)[1]
        assert apart.exchange_s > eight.exchange_s
        assert apart.other_s == eight.other_s


class TestCommand:
    def test_json_is_one_object_that_says_it_is_modelled(self, dbsp):
        code, out, err = dbsp("simulate", "--gpus", "4,8", *COARSE, "--planner", "dbsp", "--json")
        report = json.loads(out)
        assert (code, err) == (0, "")
        assert report["hardware"] == "a800"
        assert report["sources"]["exchange_bytes_per_s"] == "published"
        assert [row["gpus"] for row in report["rows"]] == [4] * 3 + [8] * 4
        assert {row["label"] for row in report["rows"]} == {"modelled"}
        assert all(row["end_to_end_s"] == row["attention_s"] + row["other_s"] for row in report["rows"])

    def test_the_table_and_the_csv_have_the_same_rows(self, dbsp, tmp_path):
        out = tmp_path / "rows.csv"
        code, text, _ = dbsp("simulate", "--model", "wan2.1-t2v-1.3b", *COARSE, "--mask", 0.3, "--out", out)
        rows = list(csv.DictReader(out.read_text().splitlines()))
        assert code == 0
        shown = [line.split()[1:3] for line in text.splitlines() if line.lstrip().startswith("8 ")]
        assert shown == [[row["strategy"], row["planner"]] for row in rows]
        assert "modelled" in text
        best = min(rows, key=lambda row: float(row["end_to_end_s"]))
        named = f"fastest: 8 GPUs, {best['strategy']}, {best['planner']}: {float(best['end_to_end_s']):.1f} s a video"
        assert f"{named}, {float(best['speedup']):.2f}× contiguous\n" in text

    def test_int8_is_modelled_beside_the_models_precision(self, dbsp):
        given = ("simulate", "--model", "wan2.1-t2v-1.3b", *COARSE, "--mask", 0.3, "--strategy", "U8R1")
        code, out, _ = dbsp(*given, "--planner", "dbsp", "--precision", "model,int8", "--json")
        model, int8 = json.loads(out)["rows"]
        assert (code, model["precision"], int8["precision"]) == (0, "model", "int8")
        assert int8["exchange_s"] < 0.75 * model["exchange_s"]
        assert int8["attention_s"] < model["attention_s"]
        code, text, _ = dbsp(*given, "--precision", "model,int8")
        assert (code, text.count("ring, int8")) == (0, 3)
        code, _, err = dbsp(*given, "--precision", "int4")
        assert code != 0
        assert "precision cannot be 'int4': use one of model, int8" in err

    def test_nodes_show_where_needed_keys_win(self, dbsp):
        window = "window:window=[5,13,21],block_q=240,block_k=240"
        given = ("simulate", "--nodes", "2", "--mask", window, "--planner", "dbsp", "--strategy", "U8R2")

        def times(*bandwidth):
            report = json.loads(dbsp(*given, "--hardware", "h200", *bandwidth, "--json")[1])
            assert report["sources"]["network_bytes_per_s"] == ("assumed" if bandwidth else "published")
            assert [(row["gpus"], row["keys"], row["planner"]) for row in report["rows"]] == [
                (16, "ring", "dbsp"),
                (16, "needed", "dbsp"),
            ]
            return [row["attention_s"] for row in report["rows"]]

        slow, usual = times("--bandwidth", "2"), times()
        assert slow[0] > 1.5 * slow[1]
        assert [a > b for a, b in zip(slow, usual, strict=True)] == [True, True]
        code, text, _ = dbsp(*given)
        assert (code, "needed" in text) == (0, True)
        assert "fastest: 16 GPUs, U8R2, dbsp, needed keys: " in text

    def test_a_kernel_without_log_sum_exp_leaves_ulysses(self, dbsp):
        out = dbsp("simulate", *COARSE, "--planner", "dbsp", "--kernel", "sparge", "--json")[1]
        assert [row["strategy"] for row in json.loads(out)["rows"]] == ["U8R1"]


MISTAKES = [
    (["simulate", "--model", "sora"], "use one of wan2.1-t2v-14b"),
    (["simulate", "--hardware", "a900"], "no hardware 'a900'"),
    (["simulate", "--gpus", "eight"], "must be numbers with commas"),
    (["simulate", "--gpus", "0"], "must be at least 1"),
    (["simulate", "--gpus", "1000003"], "1,000,003 GPUs are more than the 4,096 that are modelled"),
    (["simulate", "--nodes", "999999999999"], "are more than the 4,096 that are modelled"),
    (["simulate", "--node-size", "99999999999999999999"], "--node-size"),
    (["simulate", "--coarsen", "99999999999999999999"], "--coarsen"),
    (["simulate", "--planner", "greedy"], "unknown planner 'greedy'"),
    (["simulate", "--layers", "99"], "must lie between 1 and 40"),
    (["simulate", "--coarsen", "0"], "must be at least 1"),
    (["simulate", "--mask", "none.safetensors"], "is neither a preset"),
    (["simulate", "--mask", "1.5"], "density=1.5 must lie between 0 and 1"),
    (["simulate", "--mask", "small.safetensors"], "choose another --model or file"),
    (["simulate", "--strategy", "U4R2", "--kernel", "sparge"], "use a strategy UxR1"),
    (["simulate", "--kernel", "flash9"], "unknown kernel 'flash9'"),
    (["simulate", "--nodes", "none"], "--nodes 'none' must be numbers with commas"),
    (["simulate", "--nodes", "2", "--bandwidth", "0"], "--bandwidth 0 must be positive"),
    (["simulate", "--keys", "neded"], "did you mean 'needed'"),
    (["simulate", "--mask", "sparge:cdf=0.9"], "is predicted from queries and keys"),
    (["simulate", "--strategy", "U4R1", "--coarsen", "16"], "use one of U8R1"),
    (["simulate", "--hardware", "alone.yaml", "--gpus", "16", "--coarsen", "16"], "lacks; add network_latency_s"),
    (["calibrate", "--hardware", "a800"], "add --check"),
    (["calibrate", "--hardware", "a800", "--check", "--out", "x.yaml"], "exclude each other"),
    (["calibrate", "--out", "x.yaml", "--ranks", "1"], "--communication h200"),
    (["calibrate", "--out", "x.yaml", "--ranks", "0"], "--ranks must be at least 1"),
    (["calibrate", "--out", "x.yaml", "--kernel", "flash9"], "unknown kernel 'flash9'"),
]


@pytest.mark.parametrize(("args", "complaint"), MISTAKES, ids=[" ".join(args) for args, _ in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2(dbsp, tmp_path, monkeypatch, args, complaint):
    monkeypatch.chdir(tmp_path)
    grid = BlockGrid.uniform(64, 16)
    save_mask(Path("small.safetensors"), BlockMask.dense(2, grid))
    alone = load_hardware("cpu-demo")
    constants = replace(alone.constants, network_latency_s=None, network_bytes_per_s=None)
    save_hardware("alone.yaml", replace(alone, constants=constants))
    code, out, err = dbsp(*args, "--json")
    assert (code, out) == (2, "")
    assert err.startswith("dbsp: error: ")
    assert err.count("\n") == 1
    assert complaint in err
    assert not Path("x.yaml").exists()


def test_a_kernel_that_returns_no_log_sum_exp_serves_no_ring(monkeypatch):
    monkeypatch.setitem(KERNELS, "cpu", replace(KERNELS["cpu"], returns_lse=False))
    assert not returns_lse("cpu")
    mask = tiny_mask(heads=2)
    layout = SequenceLayout.contiguous(mask.grid.tokens, 2)
    with pytest.raises(ValueError, match="kernel 'cpu' cannot serve this plan: it returns no log-sum-exp"):
        DualBalancedAttention.prepare(make_plan(mask, "U1R2"), mask, layout, SequenceGroup(0, 2), kernel="cpu")


def test_every_kernel_that_merges_serves_rings():
    for kernel in ("auto", "cpu", "triton", "reference"):
        assert returns_lse(kernel)
    assert not returns_lse("sparge")
    with pytest.raises(ValueError, match="use one of wan"):
        require_model("nothing")


@pytest.mark.parametrize("gpus", [8, 16])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_our_planner_loses_to_no_plan_that_it_could_have_had(gpus, seed):
    """Coarse blocks, where whole heads decide: by the same model, on the same layout, but for what is not worth it."""
    spec, machine, topology = require_model("wan2.1-t2v-14b"), load_hardware("a800"), Topology(gpus)
    (mask,) = masks_for(spec, "0.3", layers=1, coarsen=8, seed=seed)
    shape = AttentionShape(1, mask.heads, mask.grid.tokens, spec.head_dim)
    for strategy in candidates(gpus, mask.grid):
        run = RunConfig(strategy, "dbsp")
        layout = run.layout(mask)
        others = [
            make_plan(mask, strategy, PlannerConfig(planner, paper=PaperConfig(equal_heads=cap)), layout=layout)
            for planner in ("dbsp", "paper", "contiguous", "snake")
            for cap in (False, True)
        ]
        least = min(predict(plan, shape, machine, topology, layout).total_s for plan in others)
        found = simulate_layer(run, mask, spec, machine, topology).prediction.total_s
        assert found <= least * (1 + WORTH_A_LOOK), strategy


def test_ours_is_no_slower_than_the_papers_where_heads_are_few():
    """What `dbsp simulate --coarsen 4 --mask 0.3 --strategy U8R1` shows."""
    spec = require_model("wan2.1-t2v-14b")
    masks = masks_for(spec, "0.3", layers=1, coarsen=4)
    rows = simulate(spec, masks, load_hardware("a800"), [8], ["paper", "dbsp"], strategy="U8R1")
    seconds = {row.planner: row.attention_s for row in rows}
    assert seconds["dbsp"] <= seconds["paper"]
