"""scripts/train_video: it trains, stops, goes on to the same losses, and says what is wrong with its options."""

from __future__ import annotations

import csv
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dbsp_core.utils.errors import UserError
from scripts.bench.sequences.mixed_training import measure, rows_of
from scripts.training.video.clips import encode_clips
from scripts.training.video.mixed import Mix
from scripts.training.video.settings import Settings
from tests.scripts.training.train_video_cases import (
    go_on_from_another,
    gradients_of_mix,
    small,
    steps_of,
    stopped_and_not,
)
from tests.support.programs import run_module
from tests.support.workers import assert_all_raise

MASK = "mask: {source: sparge, topk: 0.5, similarity: -1.0, block_q: 8, block_k: 8}\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Two videos with captions, larger than they are trained on, and one without."""
    import imageio.v3 as imageio

    videos = tmp_path_factory.mktemp("videos")
    for number in range(2):
        noise = torch.rand(7, 60, 96, 3, generator=torch.Generator().manual_seed(number)) * 255
        imageio.imwrite(videos / f"{number}.mp4", noise.byte().numpy(), fps=16)
        (videos / f"{number}.txt").write_text("a red ball bounces over a blue plain floor\n")
    (videos / "masks.yaml").write_text(MASK)
    return videos


@pytest.fixture(scope="module")
def encoded(folder, tmp_path_factory) -> Path:
    return encode_clips(small("--data", folder, "--out", tmp_path_factory.mktemp("out")))


def test_clips_are_encoded_once(folder, encoded):
    clip = load_file(encoded / "000000.safetensors")
    assert clip["latents"].shape == (16, 2, 6, 8)
    assert clip["text"].shape == (10, 64), "nine words and the end, no padding"
    assert len(load_file(encoded / "no-caption.safetensors")["text"]) == 1
    times = {path: path.stat().st_mtime_ns for path in encoded.iterdir()}
    assert encode_clips(small("--data", folder, "--out", encoded.parent)) == encoded
    assert {path: path.stat().st_mtime_ns for path in encoded.iterdir()} == times
    assert encode_clips(small("--data", "synthetic:1", "--out", encoded.parent)) != encoded


@pytest.mark.parametrize(
    ("world", "options", "weights"),
    [
        (2, ("--sequence-parallel", 1), "diffusion_pytorch_model.safetensors"),
        (2, ("--sequence-parallel", 2, "--lora", 2, "--precision", "bf16"), "pytorch_lora_weights.safetensors"),
        pytest.param(
            4,
            ("--sequence-parallel", 2, "--fsdp", "--checkpointing"),
            "diffusion_pytorch_model.safetensors",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_stopped_run_goes_on_to_the_same_losses(pool, folder, encoded, tmp_path, world, options, weights):
    settings = small("--config", folder / "masks.yaml", "--out", tmp_path, "--ranks", world, *options)
    for kept, resumed, files in pool(world).run(stopped_and_not, settings, encoded, 4):
        assert len(kept) == 4
        assert len(set(kept)) == 4
        assert resumed == kept
        assert files == [weights]


MIX = "5x48x64+1x48x64,2*1x32x48,none,1x48x48"


@pytest.mark.parametrize(("step", "bags"), [(0, ()), (1, ()), (0, ("--bags", "g2n2", "--max-tokens", 40))])
def test_images_and_videos_in_one_step_have_one_process_gradients(pool, folder, encoded, tmp_path, step, bags):
    """Each rank has the loss of its own samples, and one has none."""
    options = ("--config", folder / "masks.yaml", "--out", tmp_path, "--mix", MIX, "--ranks", 4, *bags)
    settings = small(*options, "--sequence-parallel", 4)
    assert max(pool(4).run(gradients_of_mix, settings, encoded, step)) <= 1e-5


@pytest.mark.long
def test_images_and_videos_in_one_step_have_the_same_losses_on_any_ranks(pool, folder, encoded, tmp_path):
    found = []
    bags = "--bags", "g1n2+g2n1", "--fsdp", "--checkpointing"
    ways = (1, 1, ()), (2, 2, ("--checkpointing",)), (4, 2, ()), (4, 4, ("--fsdp",)), (4, 4, bags)
    for world, sequence, more in ways:
        (out := tmp_path / str(len(found))).mkdir()
        options = ("--config", folder / "masks.yaml", "--out", out, "--mix", MIX, *more)
        settings = small(*options, "--ranks", world, "--sequence-parallel", sequence)
        found += pool(world).run(steps_of, settings, encoded, 3)
    for losses in found[1:]:
        assert losses == pytest.approx(found[0], abs=1e-5)


@pytest.mark.long
def test_fifty_steps_in_bags_have_the_losses_of_one_process(pool, folder, encoded, tmp_path):
    found = []
    for world, bags in ((1, ()), (4, ("--bags", "g2n2"))):
        (out := tmp_path / str(world)).mkdir()
        options = ("--config", folder / "masks.yaml", "--out", out, "--mix", MIX, "--save-every", 100, *bags)
        settings = small(*options, "--ranks", world, "--sequence-parallel", world)
        found += pool(world).run(steps_of, settings, encoded, 50)
    assert len(set(found[0])) == 50
    for losses in found[1:]:
        assert losses == pytest.approx(found[0], abs=1e-5)


def test_the_benchmark_has_the_same_gradients_every_way_but_padding(pool, encoded):
    """scripts/bench/sequences/mixed_training.py, with a loader that has most."""
    mix = Mix.parse("5x48x64,2*1x48x64+1x32x48")
    found = pool(2).run(measure, "sparge", mix, 1, encoded)
    rows = rows_of("sparge", found, np.array([24 + 2 * 12 + 6]), "measured")
    ways = ["padded to the longest", "no bags: one loader a rank", "KnapFormer g1n2", "KnapFormer g2n1", "bags g1n2"]
    assert [row.way for row in rows] == [*ways, "one bag of all ranks"]
    assert all(row.wir >= row.imbalance >= 1 for row in rows)
    assert rows[-1].core_ratio == rows[-1].wall_ratio == 1
    padded, *others = (float(row.gradients_differ) for row in rows)
    assert max(others) <= 1e-5 < padded


def test_a_mix_that_cannot_be_meant():
    for mix, complaint in (
        ("5x48", "must be COUNT"),
        ("6x48x64", "frames must be 4n"),
        ("9x48x64", "larger than the clips, 5x48x64"),
        ("none,none", "has no samples"),
    ):
        with pytest.raises(UserError, match=complaint):
            Mix.parse(mix, (5, 48, 64))
    with pytest.raises(UserError, match="leaves a data-parallel group of 2 without samples"):
        Mix.parse("5x48x64,none", (5, 48, 64)).require_groups(2, 2)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--bags", "g2n2"), "share out the sequences of a --mix"),
        (("--mix", MIX, "--max-tokens", 9), "limits what bags hold; give --bags"),
        (("--mix", MIX, "--bags", "g3n1", "--ranks", 4, "--sequence-parallel", 4), "do not divide 4; 4 fit g1n4"),
        (("--mix", MIX, "--bags", "two"), "bags 'two' are not of the form gGnN"),
        (("--mix", MIX, "--bags", "auto", "--max-tokens", 0), "bags.max_tokens=0 must be at least 1"),
    ],
)
def test_bags_that_cannot_be_meant(options, complaint):
    with pytest.raises(UserError, match=complaint):
        small(*options)


def test_a_checkpoint_of_other_options(pool, encoded, tmp_path):
    settings = small("--out", tmp_path, "--ranks", 2, "--sequence-parallel", 2)
    complaint = "was made with lora=2; give the same, or another --out"
    assert_all_raise(pool, 2, complaint, go_on_from_another, settings, encoded)


def test_the_command_goes_on_from_a_checkpoint(pool, folder, tmp_path):
    """Two ranks of its own, after one step in the pool's."""
    sizes = ("--height", 48, "--width", 64, "--frames", 5, "--warm-up", 2)
    given = ("--data", folder, "--config", folder / "masks.yaml", "--out", tmp_path, "--ranks", 2)
    options = (*given, "--sequence-parallel", 2, "--lora", 2)
    settings = small(*options)
    (first,) = {tuple(losses) for losses in pool(2).run(steps_of, settings, encode_clips(settings), 1)}
    done = run(*options, *sizes, "--steps", 2)
    assert done.returncode == 0, done.stderr
    assert "ρ_s" in done.stderr
    with (tmp_path / "loss.csv").open() as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    assert len(losses) == 2
    assert losses[0] == pytest.approx(first[0], rel=1e-8), "nine digits are written"
    assert (tmp_path / "lora" / "pytorch_lora_weights.safetensors").is_file()


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return run_module("scripts.training.video", *arguments)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--ranks", 4, "--sequence-parallel", 3), "4 ranks cannot be split into groups of --sequence-parallel 3"),
        (("--ranks", 4, "--batch", 2), "--batch 2 does not divide over 4 data-parallel groups"),
        (("--model", "nowhere"), "is no folder of a diffusers pipeline: it has no model_index.json"),
        (("--frames", 6), r"frames must be 4n \+ 1"),
        (("--height", 40), "multiples of 16"),
        (("--steps", 0), "--steps 0 must be at least 1"),
    ],
)
def test_options_that_cannot_be_meant(options, complaint):
    with pytest.raises(UserError, match=complaint):
        small(*options)


def test_another_kind_of_model(tmp_path):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    with pytest.raises(UserError, match="holds a FluxPipeline"):
        Settings.parse(["--model", str(tmp_path)])


def test_data_that_cannot_be_used(folder, tmp_path):
    with pytest.raises(UserError, match=r"has no \.mp4 files"):
        encode_clips(small("--data", tmp_path, "--out", tmp_path))
    with pytest.raises(UserError, match="write synthetic:COUNT"):
        encode_clips(small("--data", "synthetic:many", "--out", tmp_path))
    with pytest.raises(UserError, match="has 7 frames, --frames asks for 9"):
        encode_clips(small("--data", folder, "--out", tmp_path, "--frames", 9))
    (tmp_path / "0.mp4").write_bytes(b"no video")
    with pytest.raises(UserError, match=r"1 videos have no caption, 0\.mp4 first"):
        encode_clips(small("--data", tmp_path, "--out", tmp_path))
    (tmp_path / "0.txt").write_text("a caption")
    with pytest.raises(UserError, match="cannot be read as a video"):
        encode_clips(small("--data", tmp_path, "--out", tmp_path))
