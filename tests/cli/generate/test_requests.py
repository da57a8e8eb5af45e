"""What a request for a video means, and what is rejected before anything is made: prompts and paths."""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from dbsp_cli.generate.pipeline import Features
from dbsp_cli.generate.ranks import RankInfo
from dbsp_cli.generate.request import Generation, GenerationRequest, resolve
from dbsp_cli.tiny_models import TRAINED_WAN, make_tiny, unknown_words
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockGrid
from dbsp_core.masks.mask_writer import save_mask
from dbsp_core.models.table import TINY_MODELS
from dbsp_core.sources import SpargeSource
from dbsp_core.sources.spec import mask_values
from dbsp_core.utils.errors import UserError

SIZE = ("generate.height=64", "generate.width=96", "generate.num_frames=9", "generate.steps=1")


def decided(folder: Path, info: RankInfo = RankInfo(), **given: object) -> Generation:  # noqa: B008  it is frozen
    """What a request means, for a rank."""
    usual = {"config": "tiny-wan", "prompt": "a red ball", "out": str(folder / "v.mp4"), "changes": SIZE}
    return resolve(GenerationRequest(**usual | given), info)


class TestPrompts:
    def test_an_empty_prompt_is_a_prompt(self, tmp_path):
        assert decided(tmp_path, prompt="").config.generate.prompt == ""
        by_setting = decided(tmp_path, prompt=None, changes=(*SIZE, "generate.prompt=''"))
        assert [output.prompt for output in by_setting.outputs] == [""]

    def test_none_is_rejected(self, tmp_path):
        with pytest.raises(UserError, match="there is no prompt; give one with --prompt"):
            decided(tmp_path, prompt=None)

    def test_a_command_line_that_the_locale_cannot_read_is_utf_8(self, tmp_path):
        """Python hands bytes beyond a locale's encoding on as surrogates."""
        as_read = "ein Bär".encode().decode("ascii", "surrogateescape")
        changes = (*SIZE, f"generate.negative_prompt={as_read}")
        video = decided(tmp_path, prompt=as_read, changes=changes).config.generate
        assert (video.prompt, video.negative_prompt) == ("ein Bär", "ein Bär")
        with pytest.raises(UserError, match=r"--prompt .* is not text in UTF-8"):
            decided(tmp_path, prompt="ein Bär".encode("latin-1").decode("ascii", "surrogateescape"))

    def test_a_file_has_a_prompt_on_each_line(self, tmp_path):
        (tmp_path / "p.txt").write_text("a red ball\n\n  a blue cube \n", encoding="utf-8")
        made = decided(tmp_path, prompt=f"@{tmp_path / 'p.txt'}", out=str(tmp_path / "{index}.mp4"))
        assert [output.prompt for output in made.outputs] == ["a red ball", "a blue cube"]
        (tmp_path / "empty.txt").write_text("\n")
        (tmp_path / "binary.txt").write_bytes(b"\xff")
        for name, said in (
            ("empty.txt", "has no prompts; write one a line"),
            ("binary.txt", "is not text in UTF-8"),
            ("gone.txt", "gone.txt does not exist; give a text, or @FILE with one prompt a line"),
        ):
            with pytest.raises(UserError, match=f"^--prompt: .*{said}$"):
                decided(tmp_path, prompt=f"@{tmp_path / name}")

    @pytest.mark.parametrize(
        ("prompt", "unknown"),
        [
            ("a red ball bounces over a blue checkered floor", None),
            ("a purple dog bounces, over a dog", "purple, dog, ,"),
            ("A red ball", "A"),
        ],
    )
    def test_words_that_a_model_cannot_know_are_named(self, tmp_path, prompt, unknown):
        copy = tmp_path / "mine" / "tokenizer"
        copy.mkdir(parents=True)
        shutil.copy(TRAINED_WAN / "tokenizer" / "tokenizer.json", copy)
        expected = None
        if unknown:
            expected = (
                f"the prompt has words that this model has never seen: {unknown}; it knows a, ball, behind, blue"
            )
        for folder in (TRAINED_WAN, tmp_path / "mine"):
            said = unknown_words(folder, prompt)
            assert (said and said[: len(expected or "")]) == expected
        assert unknown_words(tmp_path, prompt) is None
        warnings = decided(tmp_path, config="tiny-wan-trained", prompt=prompt, videos=2, out="{seed}.mp4").warnings
        assert len(warnings) == (unknown is not None)


class TestSettings:
    def test_another_source_has_none_of_the_settings_of_the_one_before(self, tmp_path):
        made = decided(tmp_path, config="tiny-wan-trained", changes=["mask.source=dense"])
        assert mask_values(made.config.mask)["source"] == "dense"
        made = decided(tmp_path, config="tiny-wan-trained", changes=["mask.source=sparge", "mask.cdf=0.7"])
        assert (made.config.mask.cdf, made.config.mask.similarity) == (0.7, SpargeSource().similarity)

    def test_a_setting_that_is_only_a_source_is_unknown(self, tmp_path):
        with pytest.raises(UserError, match="unknown key 'source'"):
            decided(tmp_path, changes=["source=dense"])

    def test_a_tiny_model_s_name_has_its_video(self, tmp_path):
        named, configured = (
            decided(tmp_path, changes=(), **given)
            for given in ({"config": None, "model": "tiny-wan-trained"}, {"config": "tiny-wan-trained"})
        )
        assert named.config == configured.config

    def test_a_tiny_model_in_a_file_of_ones_own_has_its_video(self, tmp_path):
        (tmp_path / "mine.yaml").write_text("model: tiny-wan-trained\nmask: dense\n")
        made = decided(tmp_path, config=str(tmp_path / "mine.yaml"), changes=()).config.generate
        shipped = decided(tmp_path, config="tiny-wan-trained", changes=()).config.generate
        sizes = (made.height, made.width, made.num_frames, made.steps, made.seed, made.guidance_scale)
        assert sizes == (144, 240, 33, 12, shipped.seed, 3.0)

    @pytest.mark.parametrize(("model", "thw", "text"), [("wan", (3, 4, 6), 0), ("cogvideox", (2, 4, 6), 226)])
    def test_a_mask_file_of_another_size_is_noticed_before_weights_are_loaded(self, tmp_path, model, thw, text):
        heads = TINY_MODELS[model].sizes[1]
        for name, frames in (("right", thw[0]), ("wrong", thw[0] + 1)):
            grid = BlockGrid(text + frames * thw[1] * thw[2], text, 16, 16, (frames, *thw[1:]))
            save_mask(tmp_path / f"{name}.safetensors", BlockMask.dense(heads, grid))
        asked = {"config": None, "model": f"tiny-{model}"}
        assert decided(tmp_path, **asked, changes=[*SIZE, f"mask={tmp_path}/right.safetensors"])
        with pytest.raises(UserError, match=r"--set mask: mask file .*wrong.safetensors is for .* tokens"):
            decided(tmp_path, **asked, changes=[*SIZE, f"mask={tmp_path}/wrong.safetensors"])


class TestVideos:
    def test_each_prompt_has_its_seeds_and_each_video_a_file(self, tmp_path):
        (tmp_path / "p.txt").write_text("a red ball\nthe sea, at dusk!\n")
        made = decided(
            tmp_path, prompt=f"@{tmp_path / 'p.txt'}", seed=7, videos=2, out=str(tmp_path / "{prompt}-{seed}.mp4")
        )
        assert [(output.path.name, output.prompt, output.seed) for output in made.outputs] == [
            ("a-red-ball-7.mp4", "a red ball", 7),
            ("a-red-ball-8.mp4", "a red ball", 8),
            ("the-sea-at-dusk-7.mp4", "the sea, at dusk!", 7),
            ("the-sea-at-dusk-8.mp4", "the sea, at dusk!", 8),
        ]

    @pytest.mark.parametrize(
        ("out", "said"),
        [
            ("v.mp4", "names one file for several of 3 videos; put {index} in the name"),
            ("{prompt}.mp4", "names one file for several of 3 videos"),
            ("{number}.mp4", "use the fields {index}, {seed}, {prompt}, or double the braces of a name"),
            ("{.mp4", "use the fields {index}, {seed}, {prompt}"),
            ("{index:x!}.mp4", "use the fields {index}, {seed}, {prompt}"),
            ("{index.real}.mp4", "use the fields {index}, {seed}, {prompt}"),
            ("{index}.avi", "must end in .mp4"),
        ],
    )
    def test_a_pattern_that_does_not_do_is_rejected(self, tmp_path, out, said):
        with pytest.raises(UserError, match=re.escape(said)):
            decided(tmp_path, videos=3, out=str(tmp_path / out))

    @pytest.mark.parametrize("videos", [0, -1, 100_001])
    def test_a_number_of_videos_that_is_none_is_rejected(self, tmp_path, videos):
        with pytest.raises(UserError, match=f"--videos {videos} must be at least 1, and all videos at most 100,000"):
            decided(tmp_path, videos=videos, out=str(tmp_path / "{index}.mp4"))

    def test_what_is_there_is_left_out_when_resuming(self, tmp_path):
        (tmp_path / "1.mp4").write_bytes(b"made before")
        asked = {"videos": 3, "out": str(tmp_path / "{index}.mp4"), "report": tmp_path / "r"}
        assert [output.path.stem for output in decided(tmp_path, **asked).left] == ["0", "1", "2"]
        made = decided(tmp_path, resume=True, **asked)
        assert [output.path.stem for output in made.left] == ["0", "2"]
        assert (len(made.outputs), made.report_of(made.left[1])) == (3, tmp_path / "r" / "2")

    def test_videos_of_one_name_in_several_folders_have_reports_of_their_own(self, tmp_path):
        made = decided(tmp_path, videos=2, out=str(tmp_path / "{seed}" / "ball.mp4"), report=tmp_path / "r")
        assert [made.report_of(output) for output in made.outputs] == [
            tmp_path / "r" / str(output.seed) / "ball" for output in made.outputs
        ]

    def test_files_that_are_replaced_are_named(self, tmp_path):
        assert decided(tmp_path, out=str(tmp_path / "new.mp4")).warnings == ()
        for name in ("0.mp4", "1.mp4"):
            (tmp_path / name).write_text("somebody's")
        (said,) = decided(tmp_path, out=str(tmp_path / "1.mp4")).warnings
        assert re.match(r"--out .*/1.mp4 exists and is replaced when the video is complete; give another --out", said)
        several = {"videos": 3, "out": str(tmp_path / "{index}.mp4")}
        (said,) = decided(tmp_path, **several).warnings
        assert re.match(r"--out .*/0.mp4 and 1 more exist and are replaced", said)
        assert decided(tmp_path, resume=True, **several).warnings == ()

    def test_one_video_has_the_report_to_itself(self, tmp_path):
        made = decided(tmp_path, report=tmp_path / "r")
        assert made.report_of(made.outputs[0]) == tmp_path / "r"

    def test_a_video_to_start_from_must_be_there_and_be_of_use(self, tmp_path):
        (tmp_path / "from.mp4").touch()
        assert decided(tmp_path, video=tmp_path / "from.mp4").video == tmp_path / "from.mp4"
        with pytest.raises(UserError, match=r"--video .*gone.mp4 does not exist; give a video file, such as an mp4"):
            decided(tmp_path, video=tmp_path / "gone.mp4")
        with pytest.raises(UserError, match=r"--video: tiny-wan2.2 does not start from a video; Wan text-to-video"):
            decided(tmp_path, config=None, model="tiny-wan2.2", video=tmp_path / "from.mp4")
        with pytest.raises(UserError, match="--out and --video are the same path"):
            decided(tmp_path, video=tmp_path / "from.mp4", out=str(tmp_path / "from.mp4"))


@pytest.mark.parametrize(
    ("features", "said"),
    [
        ({"offload": "disk"}, "--offload disk: use model, sequential"),
        ({"offload": "model"}, "--offload needs a GPU; without one, weights are in the host's memory already"),
        ({"quantize": "int3"}, "--quantize int3: use int8, fp8, nf4"),
        ({"quantize": "nf4"}, "bitsandbytes is not installed; pip install bitsandbytes"),
        ({"cache": "teacache"}, "--cache teacache: use first-block, or first-block=0.1 with a threshold above 0"),
        ({"cache": "first-block=0"}, "--cache first-block=0: use first-block, or first-block=0.1"),
        ({"cache": "first-block=much"}, "--cache first-block=much: 'much' is not a number"),
        ({"lora": ("a=b",)}, "--lora a=b: 'b' is not a number"),
    ],
)
def test_features_that_cannot_be_had_are_rejected(tmp_path, monkeypatch, features, said):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else found(name))
    with pytest.raises(UserError, match=f"^{re.escape(said)}"):
        decided(tmp_path, features=Features(**features))


def test_path_of_lora_weights_may_hold_an_equals_sign(tmp_path):
    (tmp_path / "rank=16").mkdir()
    one, other = str(tmp_path / "rank=16"), f"{tmp_path}/rank=16=0.5"
    assert Features(lora=(one, other)).loras() == [(one, 1.0), (one, 0.5)]


def test_features_with_numbers():
    features = Features(lora=("some/lora", "a.safetensors=0.5"), cache="first-block=0.2")
    assert features.loras() == [("some/lora", 1.0), ("a.safetensors", 0.5)]
    assert (features.cache_threshold(), Features(cache="first-block").cache_threshold()) == (0.2, 0.05)


class TestPaths:
    @pytest.mark.parametrize(
        ("changed", "message"),
        [
            ({"out": "folder.mp4"}, "--out .*/folder.mp4 is a folder; give the name of a file"),
            ({"out": "file/ball.mp4"}, "--out .*/file/ball.mp4: .*/file is a file, not a folder; give another path"),
            ({"report": "file"}, "--report .*/file is a file; give the name of a folder"),
            ({"report": "file/new/report"}, "--report .*/file/new/report: .*/file is a file, not a folder"),
            ({"changes": ["report={}/file"]}, "--set report: report .*/file is a file; give"),
            ({"config": "{}/my.yaml"}, r"my.yaml:2: report .*/file is a file; give the name of a folder"),
        ],
    )
    def test_path_that_cannot_be_written_is_rejected(self, tmp_path, changed, message):
        (tmp_path / "folder.mp4").mkdir()
        (tmp_path / "file").touch()
        (tmp_path / "my.yaml").write_text(f"model: tiny-wan\nreport: {tmp_path}/file\n")
        given = dict(changed)
        if "out" in given:
            given["out"] = str(tmp_path / given["out"])
        if "report" in given:
            given["report"] = tmp_path / given["report"]
        if "changes" in given:
            given["changes"] = [given["changes"][0].format(tmp_path), *SIZE]
        if "config" in given:
            given["config"] = given["config"].format(tmp_path)
        with pytest.raises(UserError, match=message):
            decided(tmp_path, **given)

    def test_a_folder_that_cannot_be_written_to_is_rejected(self, tmp_path, monkeypatch):
        closed = tmp_path / "closed"  # the tests may run as root, who may write everywhere
        closed.mkdir()
        monkeypatch.setattr("os.access", lambda path, mode: Path(path) != closed)
        with pytest.raises(
            UserError,
            match=r"--report .*/closed/new/report: folder .*/closed cannot be written to; give another path",
        ):
            decided(tmp_path, report=closed / "new" / "report")
        with pytest.raises(UserError, match=r"--out .*/closed/ball.mp4: folder .*/closed cannot be written to"):
            decided(tmp_path, out=str(closed / "ball.mp4"))

    def test_only_the_first_rank_must_be_able_to_write(self, tmp_path):
        (tmp_path / "file").touch()
        decided(tmp_path, RankInfo(rank=1, world=2), report=tmp_path / "file")
        decided(tmp_path, RankInfo(rank=1, world=2), out=str(tmp_path / "file" / "v.mp4"))
        with pytest.raises(UserError, match="file is a file, not a folder"):
            decided(tmp_path, RankInfo(rank=0, world=2), out=str(tmp_path / "file" / "v.mp4"))
        with pytest.raises(UserError, match="is a file"):
            decided(tmp_path, RankInfo(rank=0, world=2), report=tmp_path / "file")

    def test_nothing_is_made_by_looking(self, tmp_path):
        decided(tmp_path, out=str(tmp_path / "a" / "ball.mp4"), report=tmp_path / "b" / "report")
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("path", "said"),
        [
            ("v.mp4", "--out and --report are the same path"),
            ("link", "--out and --report are the same path"),
            ("v.mp4/report", "--report .* is inside --out, a file"),
        ],
    )
    @pytest.mark.parametrize("by", ["option", "setting"])
    def test_two_results_at_one_path_are_rejected(self, tmp_path, path, said, by):
        (tmp_path / "link").symlink_to("v.mp4")
        changes = SIZE if by == "option" else (*SIZE, f"report={tmp_path / path}")
        with pytest.raises(UserError, match=said):
            decided(tmp_path, report=tmp_path / path if by == "option" else None, changes=changes)

    def test_masks_are_not_recorded_over_the_video_or_a_file(self, tmp_path, monkeypatch):
        monkeypatch.setenv("DBSP_RECORD", str(tmp_path / "v.mp4"))
        with pytest.raises(UserError, match=r"--out and \$DBSP_RECORD are the same path"):
            decided(tmp_path, changes=SIZE)
        (tmp_path / "file").touch()
        monkeypatch.setenv("DBSP_RECORD", str(tmp_path / "file"))
        with pytest.raises(UserError, match=r"\$DBSP_RECORD .*/file is a file; give the name of a folder"):
            decided(tmp_path, changes=SIZE)

    def test_what_the_video_is_made_from_is_kept(self, tmp_path):
        (tmp_path / "c.yaml").write_text("model: tiny-wan\n", encoding="utf-8")
        Image.new("RGB", (96, 64)).save(tmp_path / "first.png")
        (tmp_path / "v.mp4").symlink_to("c.yaml")
        with pytest.raises(UserError, match="--out and --config are the same path"):
            decided(tmp_path, config=str(tmp_path / "c.yaml"))
        (tmp_path / "w.mp4").symlink_to("first.png")
        images = {"model": "tiny-wan-i2v", "config": None, "images": (tmp_path / "first.png",)}
        with pytest.raises(UserError, match="--out and --image are the same path"):
            decided(tmp_path, out=str(tmp_path / "w.mp4"), **images)

    def test_a_report_around_the_video_is_fine(self, tmp_path):
        assert decided(tmp_path, report=tmp_path).report == tmp_path


class TestUsersFolder:
    @pytest.fixture
    def folder(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path / "user"))
        (tmp_path / "user").mkdir()
        monkeypatch.chdir(tmp_path)
        return tmp_path / "user"

    def test_a_checkpoint_is_found_there(self, folder):
        make_tiny("wan", folder / "wan")
        by_option = decided(folder, config=None, model="~/wan")
        by_setting = decided(folder, changes=(*SIZE, "model=~/wan"))
        assert by_option.model == by_setting.model == str(folder / "wan")
        with pytest.raises(UserError, match=f"--model {folder}/won: neither a model that"):
            decided(folder, config=None, model="~/won")

    def test_options_of_the_command_are_read_so(self, folder, dbsp, mistake):
        asked = ("generate", "--config", "tiny-wan", "--prompt", "x", "--nproc", "1", "--dry-run")
        sizes = [part for size in SIZE for part in ("--set", size)]
        code, out, _ = dbsp(*asked, *sizes, "--out=~/v.mp4", "--report=~/r")
        assert code == 0
        assert f"# {folder}/v.mp4: seed 42, 'x'\n" in out
        assert f"\nreport: {folder}/r\n" in out
        for option in ("--out", "--report", "--image", "--video"):
            said = f"{option}'?: path '' is empty; give the name of a file or folder, or leave it out"
            assert re.search(said, mistake(*asked, *sizes, option, ""))

    @pytest.mark.parametrize(
        ("command", "said"),
        [
            (("plan", "~/m", "--gpus", 2), "mask file FOLDER/m does not exist"),
            (("plan", "x", "--gpus", 2, "--picture", "~/m/p"), "--picture FOLDER/m/p: FOLDER/m is a file"),
            (("masks", "info", "~/m"), "mask file FOLDER/m does not exist"),
            (("masks", "convert", "~/m.npy", "out", "tokens=64"), "file FOLDER/m.npy does not exist"),
            (("masks", "fit", "x", "~/m"), "FOLDER/m holds no recording"),
            (("report", "~/m"), "report FOLDER/m does not exist; a run leaves one in"),
        ],
    )
    def test_other_commands_too(self, folder, mistake, command, said):
        if "--picture" in command:
            (folder / "m").touch()
        assert said.replace("FOLDER", str(folder)) in mistake(*command)


LONG = "a" * 300
GENERATE = ("generate", "--prompt", "x", "--nproc", "1", *(part for size in SIZE for part in ("--set", size)))


@pytest.mark.parametrize(
    "command",
    [
        ("plan", LONG, "--gpus", "2"),
        ("masks", "info", LONG),
        ("masks", "convert", f"{LONG}.npy", "out", "tokens=64"),
        ("masks", "convert", "in.npy", LONG, "tokens=64"),
        ("masks", "record", LONG, "--", "true"),
        ("masks", "fit", "x", LONG),
        ("report", LONG),
        ("tiny", "wan", LONG),
        (*GENERATE, "--config", LONG),
        (*GENERATE, "--model", LONG),
        (*GENERATE, "--config", "tiny-wan", "--out", f"{LONG}.mp4"),
        (*GENERATE, "--config", "tiny-wan", "--report", LONG),
        (*GENERATE, "--model", "tiny-wan-i2v", "--image", LONG),
        (*GENERATE, "--model", "tiny-wan", "--set", f"mask={{source: file, path: {LONG}}}"),
        (*GENERATE, "--model", "tiny-wan", "--set", f"machine={LONG}"),
    ],
    ids=lambda command: " ".join(command).replace(LONG, "LONG"),
)
def test_a_name_that_is_too_long_is_one_line(tmp_path, mistake, monkeypatch, command):
    """It is named, and it is no error of the system's that is shown."""
    monkeypatch.chdir(tmp_path)
    assert "[Errno" not in mistake(*command)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command",
    [
        ("masks", "convert", "FILE", "FILE", "tokens=64"),
        ("masks", "convert", "FILE", "LINK", "tokens=64"),
        ("masks", "info", "FILE", "--picture", "FILE"),
        ("masks", "fit", "FILE", "FILE"),
        ("plan", "FILE", "--gpus", "2", "--picture", "FILE"),
        ("report", "FILE", "--html", "FILE"),
    ],
)
def test_no_command_writes_over_what_it_reads(tmp_path, mistake, command):
    file, link = tmp_path / "m.safetensors", tmp_path / "link"
    file.write_bytes(b"kept")
    link.symlink_to(file)
    said = mistake(*[{"FILE": file, "LINK": link}.get(part, part) for part in command])
    assert "are the same path" in said
    assert file.read_bytes() == b"kept"
