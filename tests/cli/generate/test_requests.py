"""What a request for a video means, and what is refused before anything is made: prompts, paths, places."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from dbsp_cli.generate.job import GenerateRequest, resolve
from dbsp_cli.tiny_models import make_tiny
from dbsp_core.utils.errors import UserError

SIZE = ("generate.height=64", "generate.width=96", "generate.num_frames=9", "generate.steps=1")


def request(folder: Path, **given: object) -> GenerateRequest:
    usual = {"config": "tiny-wan", "prompt": "a red ball", "out": folder / "v.mp4", "changes": SIZE, "nproc": 1}
    return GenerateRequest(**usual | given)


class TestPrompts:
    def test_an_empty_prompt_is_a_prompt(self, tmp_path):
        assert resolve(request(tmp_path, prompt="")).config.generate.prompt == ""
        by_setting = resolve(request(tmp_path, prompt=None, changes=(*SIZE, "generate.prompt=''")))
        assert by_setting.settings["generate"]["prompt"] == ""

    def test_none_is_refused(self, tmp_path):
        with pytest.raises(UserError, match="there is no prompt; give one with --prompt"):
            resolve(request(tmp_path, prompt=None))

    def test_a_command_line_that_the_locale_cannot_read_is_utf_8(self, tmp_path):
        """Python hands bytes beyond a locale's encoding on as surrogates."""
        as_read = "ein Bär".encode().decode("ascii", "surrogateescape")
        changes = (*SIZE, f"generate.negative_prompt={as_read}")
        video = resolve(request(tmp_path, prompt=as_read, changes=changes)).config.generate
        assert (video.prompt, video.negative_prompt) == ("ein Bär", "ein Bär")
        with pytest.raises(UserError, match=r"--prompt .* is not text in UTF-8"):
            resolve(request(tmp_path, prompt="ein Bär".encode("latin-1").decode("ascii", "surrogateescape")))


class TestPlaces:
    @pytest.mark.parametrize(
        ("place", "said"),
        [
            ("v.mp4", "--out and --report are the same place"),
            ("link", "--out and --report are the same place"),
            ("v.log", "the log of --out and --report are the same place"),
            ("v.mp4/report", "--report .* is inside --out, a file"),
            ("v.log/report", "--report .* is inside the log of --out, a file"),
        ],
    )
    @pytest.mark.parametrize("by", ["option", "setting"])
    def test_two_results_in_one_place_are_refused(self, tmp_path, place, said, by):
        (tmp_path / "link").symlink_to("v.mp4")
        changes = SIZE if by == "option" else (*SIZE, f"report={tmp_path / place}")
        with pytest.raises(UserError, match=said):
            resolve(request(tmp_path, report=tmp_path / place if by == "option" else None, changes=changes))

    def test_masks_are_not_recorded_over_the_video_or_a_file(self, tmp_path, monkeypatch):
        monkeypatch.setenv("DBSP_RECORD", str(tmp_path / "v.mp4"))
        with pytest.raises(UserError, match=r"--out and \$DBSP_RECORD are the same place"):
            resolve(request(tmp_path, changes=SIZE))
        (tmp_path / "file").touch()
        monkeypatch.setenv("DBSP_RECORD", str(tmp_path / "file"))
        with pytest.raises(UserError, match=r"\$DBSP_RECORD .*/file is a file; give the name of a folder"):
            resolve(request(tmp_path, changes=SIZE))

    def test_what_the_video_is_made_from_is_kept(self, tmp_path):
        (tmp_path / "c.yaml").write_text("model: tiny-wan\n", encoding="utf-8")
        Image.new("RGB", (96, 64)).save(tmp_path / "first.png")
        (tmp_path / "v.mp4").symlink_to("c.yaml")
        with pytest.raises(UserError, match="--out and --config are the same place"):
            resolve(request(tmp_path, config=str(tmp_path / "c.yaml")))
        (tmp_path / "w.mp4").symlink_to("first.png")
        images = {"model": "tiny-wan-i2v", "config": None, "image": tmp_path / "first.png"}
        with pytest.raises(UserError, match="--out and --image are the same place"):
            resolve(request(tmp_path, out=tmp_path / "w.mp4", **images))

    def test_a_report_around_the_video_is_fine(self, tmp_path):
        assert resolve(request(tmp_path, report=tmp_path)).report == tmp_path


class TestHome:
    @pytest.fixture
    def home(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        (tmp_path / "home").mkdir()
        monkeypatch.chdir(tmp_path)
        return tmp_path / "home"

    def test_a_checkpoint_is_found_there(self, home):
        make_tiny("wan", home / "wan")
        by_option = resolve(request(home, config=None, model="~/wan"))
        by_setting = resolve(request(home, changes=(*SIZE, "model=~/wan")))
        assert by_option.model == by_setting.model == str(home / "wan")
        with pytest.raises(UserError, match=f"--model {home}/won: neither a known model"):
            resolve(request(home, config=None, model="~/won"))

    def test_options_of_the_command_are_read_so(self, home, dbsp):
        asked = ("generate", "--config", "tiny-wan", "--prompt", "x", "--nproc", "1", "--dry-run", "--json")
        sizes = [part for size in SIZE for part in ("--set", size)]
        code, out, _ = dbsp(*asked, *sizes, "--out=~/v.mp4", "--report=~/r")
        assert code == 0
        assert f'"video": "{home}/v.mp4"' in out
        assert f'"report": "{home}/r"' in out
        for option in ("--out", "--report", "--image"):
            code, _, err = dbsp(*asked, *sizes, option, "")
            assert (code, err.count("\n")) == (2, 1)
            assert f"'{option}': path '' is empty; give the name of a file or folder, or leave it out" in err

    @pytest.mark.parametrize(
        ("command", "said"),
        [
            (("plan", "~/m", "--gpus", 2), "mask file HOME/m does not exist"),
            (("plan", "x", "--gpus", 2, "--picture", "~/m/p"), "--picture HOME/m/p: HOME/m is a file"),
            (("masks", "info", "~/m"), "mask file HOME/m does not exist"),
            (("masks", "convert", "~/m.npy", "out", "tokens=64"), "file HOME/m.npy does not exist"),
            (("masks", "fit", "x", "~/m"), "HOME/m holds no recording"),
            (("report", "~/m"), "report HOME/m does not exist; a run leaves one in"),
        ],
    )
    def test_other_commands_too(self, home, dbsp, command, said):
        if "--picture" in command:
            (home / "m").touch()
        code, _, err = dbsp(*command)
        assert code == 2
        assert said.replace("HOME", str(home)) in err


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
def test_a_name_that_is_too_long_is_one_line(tmp_path, dbsp, monkeypatch, command):
    """It is named, and it is no error of the system's that is shown."""
    monkeypatch.chdir(tmp_path)
    code, out, err = dbsp(*command)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert "[Errno" not in err
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
def test_no_command_writes_over_what_it_reads(tmp_path, dbsp, command):
    file, link = tmp_path / "m.safetensors", tmp_path / "link"
    file.write_bytes(b"kept")
    link.symlink_to(file)
    code, _, err = dbsp(*[{"FILE": file, "LINK": link}.get(part, part) for part in command])
    assert code == 2
    assert "are the same place" in err
    assert file.read_bytes() == b"kept"
