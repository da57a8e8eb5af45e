"""`dbsp masks`: convert and info on real files and recordings."""

from __future__ import annotations

import itertools
import json
import shutil

import numpy as np
import pytest
import torch

from dbsp_cli.mask_tools.recording import Recording
from dbsp_core import BlockGrid, BlockMask, MaskFile, SequenceGroup, SequenceLayout, Strategy, make_plan, save_mask
from dbsp_core.config import DbspConfig
from dbsp_core.cost.prediction import traffic_of
from dbsp_core.masks.grid import Video
from dbsp_core.masks.steps import DenoisingStep
from dbsp_core.planning.plan import usual_layout
from dbsp_core.reports.mask_recorder import MaskRecorder, RecordSettings
from dbsp_core.reports.observer import observed_session
from dbsp_core.sources import MaskRequest, SyntheticSource

THW = (3, 8, 16)
GRID = BlockGrid(384, 0, 16, 16, THW)
DRIFTING = SyntheticSource(16, 16, density=0.3, drift=0.2)


def drifting(layer, step):
    return DRIFTING.mask(MaskRequest(layer, 4, THW, step=step))


@pytest.fixture
def file(tmp_path):
    """Saves three layers, two step groups."""
    path = tmp_path / "masks.safetensors"
    masks = [[drifting(layer, step) for layer in range(3)] for step in (0, 3)]
    save_mask(path, masks, groups="5-9,10-", packed=True)
    return path


@pytest.fixture
def recording(tmp_path):
    """Records five steps of two branches, three layers."""
    recorder = MaskRecorder(RecordSettings(str(tmp_path / "recording")), 3)
    for step in range(5):
        for branch in range(2):
            recorder.begin(DenoisingStep(step, branch))
            for layer in range(3):
                recorder.mask_made(layer, layer, drifting(layer, step + 7 * branch), False)
                recorder.mask_used(layer, layer)
    return tmp_path / "recording"


def info(dbsp, path, *options):
    code, out, err = dbsp("masks", "info", path, "--json", *options)
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    return json.loads(out)


class TestInfo:
    def test_densities_and_the_grid(self, dbsp, file):
        found = info(dbsp, file)
        expected = {"tokens": 384, "heads": 4, "nq": 24, "nk": 24, "thw": list(THW), "steps": [5, 10]}
        expected |= {"warnings": []}
        assert {key: found[key] for key in expected} == expected
        densities = np.stack([drifting(layer, 0).bits.float().mean(dim=(1, 2)) for layer in range(3)])
        assert [row["layer"] for row in found["layers"]] == [0, 1, 2]
        assert np.array([row["density"] for row in found["layers"]]) == pytest.approx(densities)
        whole = {"min": densities.min(), "mean": densities.mean(), "max": densities.max()}
        assert found["density"] == pytest.approx(whole)

    def test_balance_is_that_of_plans_for_each_strategy(self, dbsp, file):
        balance, masks = info(dbsp, file, "--gpus", 4)["balance"], [drifting(layer, 0) for layer in range(3)]
        assert [row["strategy"] for row in balance] == ["U4R1", "U2R2", "U1R4"]
        for row in balance:
            layout = usual_layout("dbsp", masks[0].grid, Strategy.parse(row["strategy"]))
            plans = [make_plan(mask, row["strategy"], layout=layout) for mask in masks]
            assert row["rho_before"] == pytest.approx(np.mean([plan.rho_before for plan in plans]))
            assert row["rho"] == pytest.approx(np.mean([plan.rho for plan in plans]))
            assert row["rho_max"] == pytest.approx(max(plan.rho for plan in plans))
            assert row["rho_bound"] == pytest.approx(np.mean([plan.rho_bound for plan in plans]))
            contiguous = SequenceLayout.contiguous(masks[0].grid.tokens, 4)
            needed = [make_plan(mask, row["strategy"], layout=contiguous, keys="needed") for mask in masks]
            for key, made, of_made in (("kv_all", plans, layout), ("kv_needed", needed, contiguous)):
                received = [traffic_of(plan, of_made).kv_received for plan in made]
                assert row[key] == pytest.approx(np.mean(received) * 4 / (masks[0].heads * masks[0].grid.tokens))

    def test_drift_of_a_recording_by_branch(self, dbsp, recording):
        for branch in (0, 1):
            found = info(dbsp, recording, "--branch", branch)
            assert (found["branches"], found["steps"]) == ([0, 1], [0, 1, 2, 3, 4])
            assert [row["layer"] for row in found["drift"]] == [0, 1, 2]
            for row in found["drift"]:
                masks = [drifting(row["layer"], step + 7 * branch).bits for step in range(5)]
                pairs = list(itertools.pairwise(masks))
                iou = [float((a & b).sum()) / float((a | b).sum()) for a, b in pairs]
                assert row["iou"] == pytest.approx(iou)
                assert row["changed"] == pytest.approx([float((a ^ b).float().mean()) for a, b in pairs])
                assert row["steps"] == [1, 2, 3, 4]

    def test_rows_and_heads_without_blocks_are_warned_of(self, dbsp, tmp_path):
        bits = np.ones((2, 24, 24), bool)
        bits[0, 3] = bits[1] = False
        save_mask(tmp_path / "m.safetensors", BlockMask(bits, GRID))
        rows, heads = info(dbsp, tmp_path / "m.safetensors")["warnings"]
        assert "25 rows in layer 0" in rows
        assert "1 heads have no active blocks, the first is layer 0, head 1" in heads

    def test_a_recording_of_two_transformers_names_its_folders(self, mistake, recording, tmp_path):
        (tmp_path / "both").mkdir()
        for name in ("transformer", "transformer_2"):
            shutil.copytree(recording, tmp_path / "both" / name)
        said = f"both has recordings of several transformers; choose one of {tmp_path}/both/transformer or "
        for command in (("info", tmp_path / "both"), ("convert", tmp_path / "both", tmp_path / "out.safetensors")):
            assert said in mistake("masks", *command)

    def test_the_picture_is_a_png_of_everything(self, dbsp, recording, tmp_path):
        pytest.importorskip("matplotlib")
        picture = tmp_path / "pictures" / "masks.png"
        code, out, err = dbsp("masks", "info", recording, "--picture", picture)
        assert (code, err) == (0, "")
        assert "24×24 blocks of 16×16" in out
        from matplotlib.image import imread

        image = imread(picture)
        assert image.shape[0] > 600
        assert image.shape[1] > 1000
        assert len(np.unique(image.reshape(-1, image.shape[2]), axis=0)) > 50


class TestConvert:
    def test_options_reach_the_converter(self, dbsp, tmp_path):
        bits = torch.from_numpy(np.random.default_rng(0).random((2, 1, 3, 24, 24)) < 0.5)
        torch.save({"sparse": bits, "permute": torch.tensor([[0, 2, 5]])}, tmp_path / "plan.pth")
        out = tmp_path / "out.safetensors"
        options = ("thw=3x8x16", "block_q=16", "block_k=16", "steps=10")
        code, said, err = dbsp("masks", "convert", tmp_path / "plan.pth", out, *options)
        assert (code, said) == (0, "")
        assert "step groups 0-4,5-9, 1 layers, 3 heads, 24×24 blocks, token orders hwt, thw, wth" in err
        file = MaskFile(out)
        assert (file.packed, file.layer(0, 1).grid.orders) == (True, ("thw", "hwt", "wth"))
        assert err.startswith(f"wrote {out}: ")
        assert dbsp("masks", "convert", tmp_path / "plan.pth", out, *options)[2].startswith(f"replaced {out}: ")
        assert torch.equal(file.layer(0, 1).bits, bits[1, 0])

    def test_a_recording(self, dbsp, recording, tmp_path):
        out = tmp_path / "out.safetensors"
        assert dbsp("masks", "convert", recording, out, "step=3", "branch=1")[0] == 0
        assert torch.equal(MaskFile(out).layer(2).bits, drifting(2, 10).bits)


def test_a_run_is_recorded_where_the_environment_says(tmp_path, monkeypatch):
    for name, value in (("", str(tmp_path / "out")), ("_EVERY", "2"), ("_LAYERS", "0,2"), ("_LIMIT", "1MiB")):
        monkeypatch.setenv(f"DBSP_RECORD{name}", value)
    mask = {"source": "synthetic", "block_q": 16, "block_k": 16, "density": 0.3, "drift": 0.2}
    config = DbspConfig.load({"mask": mask})
    session = observed_session(config, SequenceGroup(0, 1), Strategy(1, 1), heads=4, layers=3)
    q = torch.randn(1, 4, 384, 8)
    for step in range(3):
        session.begin(Video(THW), timestep=900.0 - step)
        for layer in range(3):
            session.attend(layer, q, q, q)
    recording = Recording.read(tmp_path / "out")
    assert list(recording.passes) == [DenoisingStep(0), DenoisingStep(2)]
    assert recording.recorded_layers == (0, 2)
    assert torch.equal(recording.mask(2, DenoisingStep(2)).bits, drifting(2, 2).bits)


MISTAKES = [
    (["info", "none.safetensors"], "none.safetensors does not exist"),
    (["info", "."], "is not a recording of masks (no index.json); make one"),
    (["info", "FILE", "--branch", "1"], "is a mask file, whose masks apply to every pass; remove --branch"),
    (["info", "RECORDING", "--branch", "2"], "has no masks of branch 2; it has branches [0, 1]"),
    (["convert", "masks.pt", "out.safetensors"], "give thw=T,H,W"),
    (["convert", "FILE", "out.safetensors", "tokens=384"], "is already a mask file"),
    (["convert", "FILE", "out.safetensors", "thw=1,2,x"], "is not of the form T,H,W"),
    (["convert", "RECORDING", "out.safetensors"], "choose one with step=N"),
    (["convert", "masks.pt", "out.safetensors", "thv=1,2,3"], "unknown key 'thv' in the settings"),
    (["convert", "masks.pt", "out.safetensors", "thw"], "'thw' is not of the form KEY=VALUE; for"),
    (["convert", "masks.pt", "out.safetensors", "steps=5", "steps=6"], "steps is given twice"),
]


@pytest.mark.parametrize(("args", "message"), MISTAKES, ids=[" ".join(args) for args, _ in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2(mistake, file, recording, monkeypatch, args, message):
    monkeypatch.chdir(file.parent)
    before = sorted(file.parent.rglob("*"))
    paths = {"FILE": file, "RECORDING": recording}
    assert message in mistake("masks", *(paths.get(arg, arg) for arg in args))
    assert sorted(file.parent.rglob("*")) == before
