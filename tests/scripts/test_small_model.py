"""scripts/training/trained_model/quality.py: its measures are right, and it runs on the shipped weights."""

from __future__ import annotations

import csv

import pytest
import torch

from tests.support.programs import run_module

pytest.importorskip("diffusers")
pytest.importorskip("skimage")


def test_measures_of_videos():
    from scripts.training.trained_model.small_model import psnr, relative_l1, ssim

    video = torch.rand(2, 3, 48, 64, generator=torch.Generator().manual_seed(0)) * 0.5
    darker, blurred = video + 0.1, torch.nn.functional.avg_pool2d(video, 5, 1, 2)
    assert psnr(darker, video) == pytest.approx(20.0, abs=0.01), "an error of 0.1 everywhere is −20 dB of 1"
    assert psnr(blurred, video) < 20
    assert ssim(video, video) == pytest.approx(1.0)
    assert ssim(blurred, video) < ssim(darker, video) < 1, "structure counts for more than brightness"
    assert [relative_l1(video, video), relative_l1(video * 1.5, video)] == [0.0, pytest.approx(0.5, abs=1e-5)]


@pytest.mark.long
def test_denser_masks_give_videos_nearer_to_the_dense_one(tmp_path):
    few = ("--prompts", 1, "--seeds", 1, "--steps", 1, "--every", 2, "--sources", "window", "--out", tmp_path)
    done = run_module("scripts.training.trained_model.quality", *few)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "measured on the small trained model" in " ".join(done.stdout.split())
    with (tmp_path / "quality.csv").open(newline="") as file:
        sparse, denser = csv.DictReader(file)
    assert 0 < float(sparse["density"]) < float(denser["density"]) < 1
    assert float(sparse["psnr"]) < float(denser["psnr"])
    assert float(sparse["ssim"]) < float(denser["ssim"]) < 1
    assert float(sparse["relative_l1"]) > float(denser["relative_l1"]) > 0
    for name in ("quality.png", "quality-frames.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.long
def test_int8_in_exchanges_is_near_to_what_was_not_rounded(tmp_path):
    few = ("--prompts", 1, "--seeds", 1, "--steps", 1, "--masks", "dense", "--out", tmp_path)
    done = run_module("scripts.training.trained_model.int8_exchange", *few)
    assert done.returncode == 0, done.stderr[-3000:]
    with (tmp_path / "int8-videos.csv").open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert float(row["psnr"]) > 40
    assert 3e-3 < float(row["attention_error"]) < 8e-3


@pytest.mark.long
def test_int8_kernel_costs_most_where_keys_have_outliers(tmp_path):
    done = run_module("scripts.training.trained_model.int8_kernel", "--prompts", 1, "--steps", 1, "--out", tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    with (tmp_path / "int8-kernel.csv").open(newline="") as file:
        error = {(row["tokens"], row["inputs"], row["keys"]): float(row["mean_error"]) for row in csv.DictReader(file)}
    assert 4e-3 < error["small trained model", "int8", "as they are"] < 1e-2
    of_outliers = [error["synthetic, outliers in keys", "int8", keys] for keys in ("as they are", "less their mean")]
    assert of_outliers[0] > 2 * of_outliers[1]
