"""The `dbsp` command: what it prints, and that every mistake is one line and exit code 2."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from safetensors import SafetensorError

from dbsp_cli.commands.plan import memory_of, sized
from dbsp_cli.tiny_models import MAKERS
from dbsp_core import BlockGrid, BlockMask, Strategy, save_mask
from dbsp_core.models.table import MODEL_SPECS
from tests.support.generators import random_bits

GRID = BlockGrid(tokens=203, text_tokens=11, block_q=32, block_k=16)


@pytest.fixture
def mask_file(tmp_path):
    """Saves two layers of five heads."""
    path = tmp_path / "masks.safetensors"
    save_mask(path, [BlockMask(random_bits(5, GRID, seed), GRID) for seed in (1, 2)])
    return path


class TestPlanOfModel:
    def test_the_table_answers_what_a_newcomer_asks(self, dbsp):
        ask = ("plan", "--model", "wan2.1-t2v-1.3b", "--gpus", 4, "--density", 0.4, "--machine", "h100")
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
            held = report["memory"][balanced["strategy"]]
            assert balanced["gigabytes"] == pytest.approx((held["weights"] + held["activations"]) / 1e9)
        code, out, err = dbsp(*ask)
        assert (code, err) == (0, "")
        assert "wan2.1-t2v-1.3b on 4 GPUs (h100), modelled" in out
        assert "not measured: synthetic masks, no decoding; constants of h100; dbsp bench measures your GPUs" in out
        assert "constants of h100, the default (--machine: others); dbsp bench" in dbsp(*ask[:-2])[1]

    def test_the_shipped_mask_and_dense_steps_are_the_default(self, dbsp):
        ask = ("plan", "--model", "wan2.1-t2v-1.3b", "--gpus", 4, "--strategy", "U4R1", "--json")
        report = json.loads(dbsp(*ask)[1])
        assert (report["density"], report["dense_steps"]) == (pytest.approx(0.25, abs=1e-3), 10)
        _, plain, balanced = report["videos"]
        assert plain["rho"] == balanced["rho"] == 1, "SubBlock's rows are equal"
        assert json.loads(dbsp(*ask, "--density", 0.25)[1])["dense_steps"] == 0

    def test_a_size_a_density_and_dense_steps_are_modelled(self, dbsp):
        ask = ("plan", "--model", "wan2.1-t2v-1.3b", "--gpus", 2, "--machine", "h100", "--strategy", "U2R1")
        given = ("--size", "480x832x33", "--density", 0.9)
        report = json.loads(dbsp(*ask, *given, "--json")[1])
        assert report["density"] == pytest.approx(0.9, abs=1e-3)
        dense, plain, balanced = report["videos"]
        assert [row["strategy"] for row in (dense, plain, balanced)] == ["U2R1"] * 3
        assert report["break_even"] < 0.9, "so that sparse attention is slower"
        assert balanced["seconds"] > dense["seconds"]
        out = dbsp(*ask, *given)[1]
        assert "33 frames of 480×832, 50 steps, 14,040 tokens, density 0.900" in out
        assert "not worth it: sparse attention takes" in out
        all_dense = json.loads(dbsp(*ask, *given, "--dense-steps", 50, "--json")[1])["videos"]
        assert all_dense[2]["seconds"] == pytest.approx(dense["seconds"]), "dense Ulysses, as no step is sparse"
        half = json.loads(dbsp(*ask, *given, "--dense-steps", 25, "--json")[1])["videos"]
        assert half[2]["attention_s"] == pytest.approx((dense["attention_s"] + balanced["attention_s"]) / 2)


def test_minimax_h3_has_tokens_by_its_own_rule():
    """Compares with the tokens of SGLang's README (37.7k, padded text less) and of diffusers' pipeline."""
    spec = MODEL_SPECS["minimax-h3"]
    assert (spec.thw, spec.text_tokens) == ((37, 24, 42), 512 + 2 * 207)
    longer = sized(spec, "768x1344x243")
    assert (longer.thw, longer.text_tokens) == ((72, 24, 42), 512 + 2 * 405)
    assert sized(spec, "768x1344x125").thw == (42, 24, 42), "frames are rounded up to 17·k + 5"


@pytest.mark.parametrize(("strategy", "tensors"), [("U1R1", 1), ("U8R1", 6), ("U1R8", 9.1)])
def test_memory_is_weights_and_the_largest_moment_of_a_layer(strategy, tensors):
    spec, world = MODEL_SPECS["wan2.1-t2v-14b"], Strategy.parse(strategy).world
    held = memory_of(spec, Strategy.parse(strategy))
    tensor = 2 * 75_600 // world * 5120
    assert held.weights == 2 * (14_288_491_584 + 5_680_910_336)
    mlp = 2 * tensor + 2 * 2 * 75_600 // world * 13824
    assert held.activations == pytest.approx(max(tensor * (1 + 3 + tensors), mlp))


PLAN_MODEL = ["plan", "--model", "wan2.1-t2v-14b", "--gpus", "8"]
MISTAKES = [
    (["plan", "--gpus", "2"], "--model"),
    ([*PLAN_MODEL, "--machine", "a900"], "no hardware 'a900'"),
    ([*PLAN_MODEL, "--strategy", "U4R1"], "use one of U8R1"),
    ([*PLAN_MODEL, "--dense-steps", "51"], "must be at most the 50 steps"),
    ([*PLAN_MODEL, "--size", "720p"], "--size must be HEIGHTxWIDTH or HEIGHTxWIDTHxFRAMES, got '720p'"),
    ([*PLAN_MODEL, "--size", "720x1270"], "--size: width must be a multiple of 16, for example 1264, got 1270"),
    ([*PLAN_MODEL, "--size", "720x1280x80"], "--size: frames must be 4k + 1"),
    (["plan", "--model", "wan2.1-t2v-14c", "--gpus", "8"], "did you mean 'wan2.1-t2v-14b'?"),
    (
        ["generate", "--model", "qwen-image", "--prompt", "x"],
        "for other models, call dbsp_diffusers.enable in a script",
    ),
    (
        ["generate", "--model", "minimax-h3", "--prompt", "x"],
        "--model minimax-h3 is a MiniMaxH3ModularPipeline; dbsp generate supports WanPipeline",
    ),
    (
        ["generate", "--model", "hunyuanvideo", "--prompt", "x", "--negative-prompt", "y"],
        "negative_prompt=y has no effect: hunyuanvideo has no unconditional pass; remove negative_prompt",
    ),
    (["generate", "--model", "ltx-2", "--prompt", "x", "--num-frames", "240"], "must be 8k + 1 for LTX-2"),
    ([*PLAN_MODEL[:-1], "0"], "--gpus"),
    (["masks", "info", "none.safetensors"], "none.safetensors does not exist"),
    (["masks", "info", "notes.txt"], "not a readable safetensors file"),
    (["plam"], "plam"),
    (["tiny", "sora", "new"], "use one of wan, wan-trained, wan2.2"),
    (["tiny", "wan", "notes.txt"], "is not a checkpoint;"),
    (["tiny", "wan", "."], "is not a checkpoint;"),
    (["bench", "tiny-wan", "--out", "."], "is a folder; give the name of a file"),
    (["masks", "convert", "MASK", "LINK", "tokens=64"], "are the same path"),
    (["masks", "info", "MASK", "--picture", "MASK"], "are the same path"),
    (["masks", "fit", "MASK", "MASK"], "are the same path"),
]


@pytest.mark.parametrize(("args", "message"), MISTAKES, ids=[" ".join(args) for args, _ in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2(mistake, mask_file, monkeypatch, args, message):
    folder = mask_file.parent
    monkeypatch.chdir(folder)
    Path("notes.txt").write_text("this is no mask, and no checkpoint either", encoding="utf-8")
    link = folder / "link"
    link.symlink_to(mask_file)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    assert message in mistake(*({"MASK": mask_file, "LINK": link}.get(arg, arg) for arg in args))
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


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

    def test_a_failure_is_one_line_and_leaves_the_older_checkpoint_and_nothing_else(
        self, mistake, tmp_path, monkeypatch
    ):
        class HalfWritten:
            """A pipeline that cannot be written to its end."""

            def save_pretrained(self, folder):
                folder.mkdir()
                (folder / "model_index.json").write_text("{}")
                raise SafetensorError("I/O error: No space left (os error 28)")  # not an OSError

        monkeypatch.setitem(MAKERS, "wan", HalfWritten)
        folder = tmp_path / "wan"
        folder.mkdir()
        (folder / "model_index.json").write_text('{"older": true}')
        assert re.search("cannot be made: .*No space left", mistake("tiny", "wan", folder))
        assert (folder / "model_index.json").read_text() == '{"older": true}'
        assert list(tmp_path.iterdir()) == [folder]
