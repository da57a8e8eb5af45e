"""Requests for a video: their prompts and paths, and what is rejected before anything is made."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import replace
from pathlib import Path

import imageio.v2 as imageio
import numpy as np
import pytest
import torch
from PIL import Image

from dbsp_cli.generate.inputs import Features, Lora
from dbsp_cli.generate.ranks import RankInfo
from dbsp_cli.generate.request import Generation, GenerationRequest, resolve
from dbsp_cli.tiny_models import make_tiny
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.masks.mask_file import save_mask
from dbsp_core.sources import SpargeSource
from dbsp_core.sources.spec import mask_values
from dbsp_core.utils.errors import UserError
from dbsp_kernels import KERNELS

WAN = "wan2.1-t2v-14b"
SIZE = ("generate.height=64", "generate.width=96", "generate.num_frames=9", "generate.steps=1")


def decided(folder: Path, info: RankInfo = RankInfo(), **given: object) -> Generation:  # noqa: B008  it is frozen
    """Returns what a request means, for a rank."""
    usual = {"config": "tiny-wan", "prompt": "a red ball", "out": str(folder / "v.mp4"), "changes": SIZE}
    return resolve(GenerationRequest(**usual | given), info)


class TestPrompts:
    @pytest.mark.parametrize(("encoding", "end"), [("utf-8", "\n"), ("utf-8-sig", "\r\n"), ("utf-8", "\r")])
    def test_a_file_has_a_prompt_on_each_line_which_ends_as_systems_end_it(self, tmp_path, encoding, end):
        prompts = ["a red ball", "one\u2028prompt", "and\u0085another", "with\va tab\x0c\x1d", "ein Bär"]
        content = (end + end.join([*prompts, "", ""])).encode(encoding)
        (tmp_path / "p.txt").write_bytes(content)
        made = decided(tmp_path, prompt=f"@{tmp_path / 'p.txt'}", out=str(tmp_path / "{index}.mp4"))
        assert [output.prompt for output in made.outputs] == [prompt.strip() for prompt in prompts]


class TestSettings:
    def test_another_source_has_none_of_the_settings_of_the_one_before(self, tmp_path):
        made = decided(tmp_path, config="tiny-wan-trained", changes=["mask.source=dense"])
        assert mask_values(made.config.mask)["source"] == "dense"
        made = decided(tmp_path, config="tiny-wan-trained", changes=["mask.source=sparge", "mask.cdf=0.7"])
        assert (made.config.mask.cdf, made.config.mask.similarity) == (0.7, SpargeSource().similarity)

    def test_a_tiny_model_has_its_video_by_its_name_and_in_a_file_of_ones_own(self, tmp_path):
        (tmp_path / "mine.yaml").write_text("model: tiny-wan-trained\nmask: dense\n")
        shipped = decided(tmp_path, config="tiny-wan-trained", changes=()).config
        assert decided(tmp_path, config=None, model="tiny-wan-trained", changes=()).config == shipped
        video = decided(tmp_path, config=str(tmp_path / "mine.yaml"), changes=()).config.generate
        sizes = (video.height, video.width, video.num_frames, video.steps, video.seed, video.guidance_scale)
        assert sizes == (144, 240, 33, 12, shipped.generate.seed, 3.0)


class TestTwoTransformers:
    def asked(self, folder, *changes):
        return decided(folder, config=None, model="tiny-wan2.2", changes=(*SIZE, *changes))

    def test_settings_of_the_second_are_checked_too(self, tmp_path):
        for name, frames in (("right", 3), ("wrong", 4)):
            save_mask(tmp_path / f"{name}.safetensors", BlockMask.dense(12, BlockGrid(frames * 24, 0, 16, 16)))
        self.asked(tmp_path, f"transformer_2.mask={tmp_path}/right.safetensors")
        with pytest.raises(UserError, match=r"^--set transformer_2.mask: mask file .*wrong.safetensors is for"):
            self.asked(tmp_path, f"transformer_2.mask={tmp_path}/wrong.safetensors")
        (said,) = self.asked(tmp_path, "transformer_2.dense_schedule.first_steps=9").warnings
        assert "makes all 1 steps dense" in said


class TestVideos:
    def test_each_prompt_has_its_seeds_and_each_video_a_file(self, tmp_path):
        (tmp_path / "p.txt").write_text("a red ball\nthe sea, at dusk!\n")
        made = decided(
            tmp_path, prompt=f"@{tmp_path / 'p.txt'}", seed=7, videos=2, out=str(tmp_path / "{index}-{seed}.mp4")
        )
        assert [(output.path.name, output.prompt, output.seed) for output in made.outputs] == [
            ("0-7.mp4", "a red ball", 7),
            ("1-8.mp4", "a red ball", 8),
            ("2-7.mp4", "the sea, at dusk!", 7),
            ("3-8.mp4", "the sea, at dusk!", 8),
        ]

    def test_what_is_there_is_left_out_when_resuming(self, tmp_path):
        (tmp_path / "1.mp4").write_bytes(b"made before")
        asked = {"videos": 3, "out": str(tmp_path / "{index}.mp4"), "report": tmp_path / "r"}
        assert [output.path.stem for output in decided(tmp_path, **asked).left] == ["0", "1", "2"]
        made = decided(tmp_path, resume=True, **asked)
        assert [output.path.stem for output in made.left] == ["0", "2"]
        assert (len(made.outputs), made.report_of(made.left[1])) == (3, tmp_path / "r" / "2")
        made = decided(tmp_path, videos=2, out=str(tmp_path / "{seed}" / "ball.mp4"), report=tmp_path / "r")
        folders = [made.report_of(output) for output in made.outputs]
        assert folders == [tmp_path / "r" / str(output.seed) / "ball" for output in made.outputs]

    def test_files_that_are_replaced_are_named(self, tmp_path):
        assert decided(tmp_path, out=str(tmp_path / "new.mp4")).warnings == ()
        for name in ("0.mp4", "1.mp4"):
            (tmp_path / name).write_text("somebody's")
        (said,) = decided(tmp_path, out=str(tmp_path / "1.mp4")).warnings
        assert re.match(r"--out .*/1.mp4 already exists and will be replaced on completion; change --out", said)
        several = {"videos": 3, "out": str(tmp_path / "{index}.mp4")}
        (said,) = decided(tmp_path, **several).warnings
        assert re.match(r"--out .*/0.mp4 and 1 more already exist and will be replaced", said)
        assert decided(tmp_path, resume=True, **several).warnings == ()


PATTERNS = {
    "v.mp4": "names one file for several of 3 videos; put {index} in the name",
    "{number}.mp4": "has an unknown field; use {index} or {seed}, and double all other braces",
    "{index}.avi": "must end in .mp4",
}
FEATURES = [
    ({"offload": "model"}, "--offload needs a GPU: on CPUs, weights are in host memory already; remove --offload"),
    ({"quantize": "nf4"}, "--quantize nf4 needs a GPU for bitsandbytes; on CPUs, use int8 or fp8"),
    ({"quantize": "int8"}, "torchao is not installed; pip install torchao"),
    ({"cache": "teacache"}, "--cache teacache is invalid; use first-block, or first-block=0.1 with a threshold"),
    ({"lora": ("a=b",)}, "--lora a=b: 'b' is not a number"),
]
IMAGES = [
    (
        "tiny-wan-i2v",
        [],
        "^tiny-wan-i2v takes 1 to 2 images, the first frame and then the last, got 0; give each",
    ),
    ("tiny-wan", ["wide.png"], "tiny-wan generates from text only; remove the image"),
    ("tiny-wan-i2v", ["tall.png"], "64×160: more than half of it would be cut off in a video of 96×64"),
    ("tiny-wan-vace", ["wide.png"] * 3, "^expected at most 2 --image options, got 3; give first and last frame$"),
]
REJECTED = [
    ({"prompt": None}, "there is no prompt; give one with --prompt"),
    ({"prompt": "@empty.txt"}, "^--prompt: .*has no prompts; write one per line$"),
    ({"prompt": "@gone.txt"}, "^--prompt: .*gone.txt does not exist; give a text, or @FILE with one prompt per line$"),
    *(({"videos": 3, "out": out}, re.escape(said)) for out, said in PATTERNS.items()),
    ({"videos": 100_001}, "--videos 100001 is out of range; use at least 1 a prompt, 100,000 in all at most"),
    ({"video": Path("gone.mp4")}, "--video gone.mp4 does not exist; give a video file, such as an mp4"),
    (
        {"config": None, "model": "tiny-wan2.2", "video": Path("from.mp4")},
        "--video: tiny-wan2.2 does not start from a video; Wan text-to-video",
    ),
    *(({"features": Features(**features)}, f"^{re.escape(said)}") for features, said in FEATURES),
    *(({"config": None, "model": model, "images": tuple(map(Path, images))}, said) for model, images, said in IMAGES),
    ({"out": "folder.mp4"}, "--out .*/folder.mp4 is a folder; give the name of a file"),
    ({"out": "file/ball.mp4"}, "--out .*/file/ball.mp4: .*/file is a file, not a folder; give another path"),
    ({"report": Path("file")}, "--report .*/file is a file; give the name of a folder"),
    ({"config": "my.yaml"}, "my.yaml:2: report .*/file is a file; give the name of a folder"),
    # what is read, or another result
    ({"config": "c.yaml", "out": "link.mp4"}, "--out and --config are the same path"),
    (
        {"config": None, "model": "tiny-wan-i2v", "images": (Path("wide.png"),), "out": "first.mp4"},
        "--out and --image are the same path",
    ),
]
"""What is asked for, and the message, for a folder with some files in it."""


@pytest.mark.parametrize(("request_changes", "message"), REJECTED)
def test_request_that_cannot_be_met_is_rejected(tmp_path, monkeypatch, request_changes, message):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchao" else found(name))
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("\n", encoding="utf-8")
    Path("folder.mp4").mkdir()
    Path("file").touch()
    save_video("from.mp4")
    Path("my.yaml").write_text("model: tiny-wan\nreport: file\n", encoding="utf-8")
    Path("c.yaml").write_text("model: tiny-wan\n", encoding="utf-8")
    Path("link.mp4").symlink_to("c.yaml")
    Image.new("RGB", (96, 64)).save("wide.png")
    Image.new("RGB", (64, 160)).save("tall.png")
    Path("first.mp4").symlink_to("wide.png")
    with pytest.raises(UserError, match=message) as caught:
        decided(tmp_path, **request_changes)
    assert "\n" not in str(caught.value)


def test_kernel_that_does_not_support_the_videos_blocks_is_rejected_before_weights(tmp_path, monkeypatch):
    """226 tokens of text are no whole number of blocks."""
    monkeypatch.setitem(KERNELS, "cpu", replace(KERNELS["cpu"], ragged_rows=False))
    asked = {"config": "tiny-cogvideox", "changes": ("kernel=cpu",)}
    with pytest.raises(
        UserError, match="--set kernel: kernel 'cpu' cannot be used here: it supports only whole heads"
    ):
        decided(tmp_path, **asked)
    decided(tmp_path, **asked | {"config": "tiny-wan"})


def save_video(path: str | Path, frames: int = 9, width: int = 96, height: int = 64, fps: int = 16) -> None:
    """Saves a video whose frames grow brighter, one after another."""
    pictures = [np.full((height, width, 3), 20 * number, dtype=np.uint8) for number in range(frames)]
    imageio.mimwrite(path, pictures, fps=fps, macro_block_size=1)


def test_features_with_numbers(tmp_path):
    """Tries paths of LoRA weights that hold an equals sign or a colon, too."""
    for name in ("rank=16", "a:transformer"):
        (tmp_path / name).mkdir()
    equals, colon = str(tmp_path / "rank=16"), str(tmp_path / "a:transformer")
    expected = {
        "some/lora": Lora("some/lora"),
        "a.safetensors=0.5": Lora("a.safetensors", 0.5),
        "a.safetensors:transformer_2": Lora("a.safetensors", 1.0, "transformer_2"),
        "a.safetensors:transformer=0.5": Lora("a.safetensors", 0.5, "transformer"),
        equals: Lora(equals),
        f"{equals}=0.5": Lora(equals, 0.5),
        f"{equals}:transformer=2": Lora(equals, 2.0, "transformer"),
        colon: Lora(colon),
        f"{colon}:transformer_2=2": Lora(colon, 2.0, "transformer_2"),
    }
    features = Features(lora=tuple(expected), cache="first-block=0.2")
    assert features.loras() == list(expected.values())
    assert (features.cache_threshold(), Features(cache="first-block").cache_threshold()) == (0.2, 0.05)


class TestPaths:
    def test_a_folder_is_found_in_the_users_and_beside_the_file_that_names_it(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path / "user"))
        monkeypatch.chdir(tmp_path)
        folder = str(make_tiny("wan", tmp_path / "user" / "wan"))
        (tmp_path / "user" / "my.yaml").write_text("model: wan\n")
        assert decided(tmp_path, config=None, model="~/wan").model == folder
        assert decided(tmp_path, changes=(*SIZE, "model=~/wan")).model == folder
        assert decided(tmp_path, config="user/my.yaml").model == folder
        with pytest.raises(UserError, match=f"--model {tmp_path}/user/won: neither a model that"):
            decided(tmp_path, config=None, model="~/won")

    def test_only_the_first_rank_must_be_able_to_write(self, tmp_path):
        (tmp_path / "file").touch()
        decided(tmp_path, RankInfo(rank=1, world=2), report=tmp_path / "file")
        decided(tmp_path, RankInfo(rank=1, world=2), out=str(tmp_path / "file" / "v.mp4"))
        with pytest.raises(UserError, match="is a file"):
            decided(tmp_path, RankInfo(rank=0, world=2), report=tmp_path / "file")

    def test_masks_are_not_recorded_over_the_video_a_file_or_older_ones(self, tmp_path, monkeypatch):
        (tmp_path / "file").touch()
        for name, message in (
            ("v.mp4", r"--out and \$DBSP_RECORD are the same path"),
            ("file", r"\$DBSP_RECORD .*/file is a file; give the name of a folder"),
        ):
            monkeypatch.setenv("DBSP_RECORD", str(tmp_path / name))
            with pytest.raises(UserError, match=message):
                decided(tmp_path)
        monkeypatch.setenv("DBSP_RECORD", str(tmp_path / "masks"))
        decided(tmp_path, config=None, model="tiny-wan2.2")
        (tmp_path / "masks" / "transformer_2").mkdir(parents=True)
        (tmp_path / "masks" / "transformer_2" / "index.json").touch()
        with pytest.raises(UserError, match=r"^\$DBSP_RECORD .*/masks already has a recording"):
            decided(tmp_path, config=None, model="tiny-wan2.2")

    def test_every_file_of_every_report_can_be_written(self, tmp_path):
        asked = {"videos": 2, "out": str(tmp_path / "{index}.mp4"), "report": tmp_path / "r"}
        decided(tmp_path, **asked)
        (tmp_path / "r" / "1" / "report.json").mkdir(parents=True)
        with pytest.raises(UserError, match=r"^--report .*/r/1: its report.json is a folder; remove it"):
            decided(tmp_path, **asked)
        (tmp_path / "r2").mkdir()
        (tmp_path / "r2" / "0").touch()
        with pytest.raises(UserError, match=r"^--report .*/r2/0 is a file; give the name of a folder"):
            decided(tmp_path, **asked | {"report": tmp_path / "r2"})
