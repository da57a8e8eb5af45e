"""What a training step is modelled to take, beside the inference whose attentions it holds."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest

from dbsp_cli.simulate import simulate
from dbsp_core import BlockGrid, BlockMask
from dbsp_core.cost.hardware import load_hardware
from dbsp_core.models.table import MODEL_SPECS
from scripts.reproduce.training_step import simulate_training
from tests.support.programs import run_module


def tiny_mask(heads=40, blocks=48):
    grid = BlockGrid.uniform(MODEL_SPECS["wan2.1-t2v-14b"].tokens, 75600 // blocks)
    odds = np.linspace(0.1, 0.9, heads)[:, None, None]
    return BlockMask(np.random.default_rng(0).random((heads, grid.nq, grid.nk)) < odds, grid)


def test_training_costs_what_backward_adds():
    model, machine = MODEL_SPECS["wan2.1-t2v-14b"], load_hardware("a800")
    given = model, [tiny_mask()], machine, [8], ["contiguous", "dbsp"]
    inference, steps = simulate(*given), simulate_training(*given)
    assert [(s.strategy, s.planner) for s in steps] == [(row.strategy, row.planner) for row in inference]
    for step, row in zip(steps, inference, strict=True):
        assert step.forward_s == pytest.approx(row.attention_s / model.calls)
        assert 2 < step.backward_s / step.forward_s < 3
        assert step.backward_bytes > step.forward_bytes > 0
        assert step.saved_bytes == pytest.approx(model.layers * step.checkpointed_bytes)
        assert step.planner != "dbsp" or step.speedup > 1
    unit = 75600 * 5120 * 2 / 8  # a rank's q in bfloat16: q, k, v and out, and float32 log-sum-exps of 128 numbers
    even = next(s for s in steps if (s.strategy, s.planner) == ("U8R1", "contiguous"))
    assert even.checkpointed_bytes == pytest.approx(unit * (4 + 4 / 2 / 128))


def program(*options: object) -> str:
    given = ["--gpus", "8", "--strategy", "U4R2", "--coarsen", "16", *map(str, options)]
    done = run_module("scripts.reproduce.training_step", *given)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_program_prints_json_and_a_table_and_writes_a_csv(tmp_path):
    rows = json.loads(program("--json", "--out", tmp_path / "steps.csv"))["rows"]
    assert len(rows) == 3
    assert all(row["step_s"] == row["forward_s"] + row["backward_s"] + row["other_s"] for row in rows)
    assert {row["label"] for row in rows} == {"modelled"}
    with (tmp_path / "steps.csv").open(newline="") as file:
        assert [float(row["step_s"]) for row in csv.DictReader(file)] == [row["step_s"] for row in rows]
    out = program()
    assert "saved, GB" in out
    assert f"{rows[-1]['backward_s']:.2f}" in out
    best = min(rows, key=lambda row: row["step_s"])
    assert f"fastest: 8 GPUs, U4R2, {best['planner']}: {best['step_s']:.2f} s a step, {best['speedup']:.2f}×" in out
