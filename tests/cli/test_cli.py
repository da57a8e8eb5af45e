"""The `dbsp` command: what it prints, and that every mistake is one line and exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from safetensors import SafetensorError

from dbsp_cli.owners_picture import owners_picture
from dbsp_cli.tiny_models import MAKERS
from dbsp_core import BlockGrid, BlockMask, Strategy, save_mask
from dbsp_core.planning.planners import PLANNERS
from dbsp_kernels.errors import install_command
from tests.support.generators import random_bits

GRID = BlockGrid(tokens=203, text_tokens=11, block_q=32, block_k=16)


@pytest.fixture
def mask_file(tmp_path):
    """Two layers of five heads."""
    path = tmp_path / "masks.safetensors"
    save_mask(path, [BlockMask(random_bits(5, GRID, seed), GRID) for seed in (1, 2)])
    return path


class TestPlan:
    def test_json_is_one_object_with_the_documented_keys(self, dbsp, mask_file):
        code, out, err = dbsp("plan", mask_file, "--gpus", 6, "--strategy", "U3R2", "--planner", "paper", "--json")
        report = json.loads(out)
        assert (code, err) == (0, "")
        assert list(report) == ["file", "gpus", "density", "plans"]
        assert (report["file"], report["gpus"]) == (str(mask_file), 6)
        (plan,) = report["plans"]
        names = [
            "strategy",
            "planner",
            "rho_before",
            "rho",
            "rho_bound",
            "moved",
            "split_heads",
            "extra_kv",
            "plan_ms",
            "keys",
            "kv_received",
        ]
        assert list(plan) == names
        assert (plan["strategy"], plan["planner"], plan["split_heads"]) == ("U3R2", "paper", 0)
        assert plan["keys"] == "all"
        assert plan["rho"] >= plan["rho_bound"] >= 1
        assert 0 <= plan["moved"] <= 1

    def test_needed_keys_are_no_more_than_all(self, dbsp, mask_file):
        given = ("plan", mask_file, "--gpus", 4, "--json")
        every, needed = (json.loads(dbsp(*given, "--keys", keys)[1])["plans"] for keys in ("all", "needed"))
        assert [plan["planner"] for plan in needed] == ["dbsp"] * 3
        assert all(plan["keys"] == "needed" and plan["rho"] >= 1 for plan in needed)
        assert all(few["kv_received"] <= all_["kv_received"] for few, all_ in zip(needed, every, strict=True))
        assert every[2]["kv_received"] == pytest.approx(2 * 3, rel=0.1), "three chunks of a share of K and of V each"

    def test_needed_keys_are_fewer_in_a_ring_if_rows_attend_to_their_neighbours(self, dbsp, tmp_path):
        near = np.abs(2 * np.arange(GRID.nq)[:, None] - np.arange(GRID.nk)) <= 2
        save_mask(tmp_path / "m.safetensors", BlockMask(np.broadcast_to(near, (4, *near.shape)).copy(), GRID))
        given = ("plan", tmp_path / "m.safetensors", "--gpus", 4, "--strategy", "U1R4", "--json")
        (every,), (needed,) = (json.loads(dbsp(*given, "--keys", keys)[1])["plans"] for keys in ("all", "needed"))
        assert 0 < needed["kv_received"] < every["kv_received"]

    @pytest.mark.parametrize("gpus", [1, 6, 8])
    def test_all_strategies_are_planned_by_default(self, dbsp, mask_file, gpus):
        plans = json.loads(dbsp("plan", mask_file, "--gpus", gpus, "--json")[1])["plans"]
        assert [plan["strategy"] for plan in plans] == [str(s) for s in Strategy.all_for(gpus)]

    def test_all_strategies_leave_out_rings_longer_than_the_mask_has_kv_blocks(self, dbsp, mask_file):
        plans = json.loads(dbsp("plan", mask_file, "--gpus", 26, "--strategy", "all", "--json")[1])["plans"]
        assert GRID.nk == 13
        assert [plan["strategy"] for plan in plans] == ["U26R1", "U13R2", "U2R13"]

    @pytest.mark.parametrize(
        ("given", "names"), [("all", list(PLANNERS)), ("paper,contiguous", ["paper", "contiguous"])]
    )
    def test_planners_are_compared_in_their_order(self, dbsp, mask_file, given, names):
        out = dbsp("plan", mask_file, "--gpus", 4, "--strategy", "U1R4", "--planner", given, "--json")[1]
        plans = {plan["planner"]: plan for plan in json.loads(out)["plans"]}
        assert list(plans) == names
        assert plans["contiguous"]["rho"] == plans["paper"]["rho_before"]
        assert plans["contiguous"]["moved"] < plans["paper"]["moved"]

    def test_the_table_ends_with_the_most_even_plan_and_says_what_the_bound_is(self, dbsp, tmp_path):
        """Whole heads cannot be even here, and rows can."""
        bits = np.zeros((2, GRID.nq, GRID.nk), dtype=bool)
        bits[0], bits[1, 0, 0] = True, True
        save_mask(tmp_path / "mask.safetensors", BlockMask(bits, GRID))
        ask = ("plan", tmp_path / "mask.safetensors", "--gpus", 2, "--strategy", "U2R1", "--planner", "snake,dbsp")
        snake, ours = json.loads(dbsp(*ask, "--json")[1])["plans"]
        assert snake["rho"] > 1.9 > 1.2 > ours["rho"] >= ours["rho_bound"] == snake["rho_bound"]
        text = dbsp(*ask)[1]
        assert f"most even: U2R1, dbsp: ρ_s {ours['rho_before']:.4f} → {ours['rho']:.4f}\n" in text
        assert "bound: least for any plan of whole rows" in text
        assert "least possible" not in text
        assert "most even" not in dbsp(*ask[:-1], "snake")[1], "one plan needs no conclusion"

    def test_each_layer_has_its_own_plan(self, dbsp, mask_file):
        densities = [
            json.loads(dbsp("plan", mask_file, "--gpus", 2, "--layer", i, "--json")[1])["density"] for i in (0, 1)
        ]
        assert densities == [float(random_bits(5, GRID, seed).mean()) for seed in (1, 2)]

    def test_the_table_has_a_row_for_each_plan(self, dbsp, mask_file):
        code, out, _ = dbsp("plan", mask_file, "--gpus", 6)
        assert code == 0
        rows = [line.split() for line in out.splitlines() if line.lstrip().startswith("U")]
        assert [row[:2] for row in rows] == [[str(s), "dbsp"] for s in Strategy.all_for(6)]

    def test_a_picture_has_the_most_even_plan_below_the_contiguous_one(self, dbsp, mask_file, monkeypatch):
        drawn = []

        def draw(title, plans):
            drawn.append((title, [name for name, _ in plans], [plan.rho for _, plan in plans]))
            return owners_picture(title, plans)

        monkeypatch.setattr("dbsp_cli.commands.plan.owners_picture", draw)
        picture = mask_file.parent / "new" / "owners.png"
        code, out, err = dbsp("plan", mask_file, "--gpus", 4, "--layer", 1, "--picture", picture, "--json")
        assert code == 0, err
        plans = json.loads(out)["plans"]
        best = min(plans, key=lambda plan: plan["rho"])
        ((title, names, (before, after)),) = drawn
        assert title == f"{mask_file.name}, layer 1: {best['strategy']}"
        assert names == ["plain sequence parallelism", "dbsp"]
        assert (before, after) == (best["rho_before"], best["rho"])
        assert min(imread(picture).shape[:2]) > 300


class TestPlanOfModel:
    def test_the_table_answers_what_a_newcomer_asks(self, dbsp):
        ask = ("plan", "--model", "wan2.1-t2v-1.3b", "--gpus", 4, "--machine", "h100")
        report = json.loads(dbsp(*ask, "--json")[1])
        assert [report[key] for key in ("model", "gpus", "machine", "label")] == [
            "wan2.1-t2v-1.3b",
            4,
            "h100",
            "modelled",
        ]
        dense, *sparse = report["videos"]
        assert (dense["attention"], dense["strategy"], dense["speedup"]) == ("dense", "U4R1", 1)
        assert [(one["strategy"], one["planner"]) for one in sparse] == [
            (str(strategy), planner) for strategy in Strategy.all_for(4) for planner in ("contiguous", "dbsp")
        ]
        for plain, balanced in zip(sparse[::2], sparse[1::2], strict=True):
            assert 1 <= balanced["rho"] < 1.02 < plain["rho"]
            assert balanced["seconds"] < plain["seconds"] < dense["seconds"]
            assert balanced["speedup"] == pytest.approx(dense["seconds"] / balanced["seconds"])
            assert balanced["attention_s"] < balanced["seconds"]
        code, out, err = dbsp(*ask)
        assert (code, err) == (0, "")
        assert "wan2.1-t2v-1.3b on 4 GPUs (h100), modelled" in out
        assert "not measured: synthetic masks, constants of h100; dbsp bench measures your GPUs" in out
        assert "constants of h100, the default (--machine: others); dbsp bench" in dbsp(*ask[:-2])[1]


HUGE = "99999999999999999999"
MISTAKES = [
    (["plan", "--gpus", "2"], "dbsp plan needs either a mask file or --model"),
    (["plan", "MASK", "--model", "wan2.1-t2v-14b", "--gpus", "8"], "dbsp plan needs either a mask file or --model"),
    (
        ["plan", "MASK", "--gpus", "2", "--machine", "h100"],
        "--machine is for --model, not for a mask file",
    ),
    *(
        (
            ["plan", "--model", "wan2.1-t2v-14b", "--gpus", "8", *given],
            f"{given[0]} is for a mask file, not for --model",
        )
        for given in (["--strategy", "U8R1"], ["--planner", "dbsp"], ["--keys", "all"], ["--picture", "x.png"])
    ),
    (["plan", "--model", "wan2.1-t2v-14c", "--gpus", "8"], "did you mean 'wan2.1-t2v-14b'?"),
    (["plan", "--model", "wan2.1-t2v-14b", "--gpus", "8", "--machine", "a900"], "no hardware 'a900'"),
    (["generate", "--prompt", "x", "--steps", "4"], "dbsp generate has no --steps; write --set generate.steps=VALUE"),
    (["generate", "--num-inference-steps=4"], "no --num-inference-steps; write --set generate.steps=VALUE"),
    (
        ["generate", "--model", "hunyuanvideo", "--prompt", "x"],
        "other families run in a script, by dbsp_diffusers.enable",
    ),
    (["plan", "MASK", "--gpus", HUGE], "--gpus"),
    (["plan", "MASK"], "--gpus"),
    (["plan", "MASK", "--gpus", "many"], "--gpus"),
    (["plan", "MASK", "--gpus", "0"], "--gpus"),
    (["plan", "MASK", "--gpus", "4", "--strategy", "U2R3"], "use one of U4R1, U2R2, U1R4"),
    (["plan", "MASK", "--gpus", "4", "--strategy", "4x1"], "not of the form UxRy"),
    (["plan", "MASK", "--gpus", "4", "--planner", "greedy"], f"use one of {', '.join(PLANNERS)}"),
    (["plan", "MASK", "--gpus", "4", "--planner", "paper,greedy"], "unknown planner 'greedy'; use one of"),
    (["plan", "MASK", "--gpus", "4", "--layer", "2"], "has 2 layers, there is no layer 2"),
    (["plan", "none.safetensors", "--gpus", "4"], "none.safetensors does not exist"),
    (["plan", "notes.txt", "--gpus", "4"], "not a readable safetensors file"),
    (["plan", "MASK", "--gpus", "4", "--ring", "2"], "--ring"),
    (["plam"], "plam"),
    (["tiny", "sora", "new"], "use one of wan, wan-trained, wan2.2"),
    (["tiny", "wan", "notes.txt"], "is not a checkpoint folder"),
    (["tiny", "wan", "notes.txt/new"], "notes.txt"),
    (["tiny", "wan", "."], "is not a checkpoint folder"),
]
MISTAKES += [([*args, "--json"], message) for args, message in MISTAKES if args[0] == "plan"]


@pytest.mark.parametrize(("args", "message"), MISTAKES, ids=[" ".join(args) for args, _ in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2(mistake, mask_file, monkeypatch, args, message):
    monkeypatch.chdir(mask_file.parent)
    Path("notes.txt").write_text("this is no mask, and no checkpoint either")
    before = sorted(mask_file.parent.iterdir())
    assert message in mistake(*(mask_file if arg == "MASK" else arg for arg in args))
    assert sorted(mask_file.parent.iterdir()) == before


@pytest.mark.parametrize("args", [[], ["--help"]])
def test_without_arguments_it_shows_its_help(dbsp, args):
    code, out, err = dbsp(*args)
    assert (code, err) == (0, "")
    assert all(command in out for command in ("tiny", "plan", "doctor", "masks"))
    assert out.count("\n") > 5


class HalfWritten:
    """A pipeline whose disk is full."""

    def save_pretrained(self, folder):
        folder.mkdir()
        (folder / "model_index.json").write_text("{}")
        raise OSError("No space left on device")


class TestTiny:
    def test_wan_is_a_pipeline_that_loads_and_replaces_an_older_one(self, dbsp, tmp_path):
        diffusers = pytest.importorskip("diffusers")
        pytest.importorskip("transformers")
        folder = tmp_path / "new" / "wan"
        folder.mkdir(parents=True)
        for name in ("model_index.json", "left-over.txt"):
            (folder / name).write_text("{}")
        code, out, err = dbsp("tiny", "wan", folder)
        assert (code, out) == (0, "")
        assert err.endswith(f"wrote a tiny wan checkpoint to {folder}\n")
        assert not (folder / "left-over.txt").exists()
        assert list(folder.parent.iterdir()) == [folder]
        pipe = diffusers.WanPipeline.from_pretrained(folder)
        assert pipe.transformer.config.num_attention_heads == 12
        assert len(pipe.transformer.blocks) == 4
        assert pipe.tokenizer("a red ball").input_ids

    def test_a_failure_leaves_the_older_checkpoint_and_nothing_else(self, mistake, tmp_path, monkeypatch):
        monkeypatch.setitem(MAKERS, "wan", HalfWritten)
        folder = tmp_path / "wan"
        folder.mkdir()
        (folder / "model_index.json").write_text('{"older": true}')
        assert mistake("tiny", "wan", folder) == "dbsp: error: No space left on device\n"
        assert (folder / "model_index.json").read_text() == '{"older": true}'
        assert list(tmp_path.iterdir()) == [folder]

    def test_a_full_disk_is_one_line(self, mistake, tmp_path, monkeypatch):
        """The disk is no real one. safetensors has its own kind of error, which is no OSError."""

        class Full:
            def save_pretrained(self, folder):
                raise SafetensorError("I/O error: No space left on device (os error 28)")

        monkeypatch.setitem(MAKERS, "wan", Full)
        err = mistake("tiny", "wan", tmp_path / "wan")
        assert err.startswith(f"dbsp: error: the tiny checkpoint {tmp_path / 'wan'} cannot be made: ")
        assert "No space left on device" in err
        assert list(tmp_path.iterdir()) == []

    def test_a_missing_host_is_named_with_the_fix(self, mistake, tmp_path, monkeypatch):
        def needs_diffusers():
            raise ImportError("No module named 'diffusers'", name="diffusers")

        monkeypatch.setitem(MAKERS, "wan", needs_diffusers)
        err = mistake("tiny", "wan", tmp_path / "wan")
        assert f"diffusers is needed to make checkpoints; {install_command('diffusers')}" in err
        assert list(tmp_path.iterdir()) == []
