"""What a run has made is never thrown away: places are looked at before, the video comes first, the rest is kept."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from dbsp_cli.generate import running
from dbsp_cli.generate.job import GenerateJob, GenerateRequest, resolve
from dbsp_cli.generate.launch import Launch
from dbsp_cli.generate.rank_output import LogFollower, RunFailed
from dbsp_cli.generate.running import GenerateResult, run_job
from dbsp_cli.generate.supervisor import run_watched
from dbsp_cli.generate.work_folder import put_folder, work_folder
from dbsp_cli.tiny_models import TRAINED_WAN, unknown_words
from dbsp_core.utils.errors import UserError
from tests.cli.generate.tiny_mp4 import tiny_mp4

REPORT = {"balance.png": b"a picture", "latents.safetensors": b"the latents", "report.json": b"{}"}


@pytest.fixture
def made(monkeypatch):
    """Lets a run's ranks leave a video, and a report where `made.append("report")` says so, and do nothing else.

    The list's other entries are called with the work folder, when the ranks have ended.
    """
    what: list = []

    def ranks(command: list[str], log: Path, ranks_folder: Path, watcher: LogFollower, *_: object) -> None:
        work = ranks_folder.parent
        (work / "video.mp4").write_bytes(tiny_mp4())
        if "report" in what:
            (work / "report").mkdir()
            for name, content in REPORT.items():
                (work / "report" / name).write_bytes(content)
        for act in what:
            if callable(act):
                act(work)

    monkeypatch.setattr(running, "run_watched", ranks)
    monkeypatch.setattr(running, "make_tiny", lambda *_: None)
    monkeypatch.setattr(running, "silence_libraries", lambda: None)
    return what


def job(folder: Path, **request: object) -> GenerateJob:
    asked = {"config": "tiny-wan", "prompt": "x", "out": folder / "ball.mp4", "report": folder / "report"}
    return resolve(GenerateRequest(**{**asked, **request}))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


class TestBefore:
    @pytest.mark.parametrize(
        ("changed", "complaint"),
        [
            ({"out": "folder.mp4"}, "--out .*/folder.mp4 is a folder; give the name of a file"),
            ({"out": "file/ball.mp4"}, "--out .*/file/ball.mp4: .*/file is a file, not a folder; give another place"),
            ({"report": "file"}, "--report .*/file is a file; give the name of a folder"),
            ({"report": "file/new/report"}, "--report .*/file/new/report: .*/file is a file, not a folder"),
            ({"changes": ["report={}/file"]}, "--set report: report .*/file is a file; give"),
            ({"config": "{}/my.yaml"}, r"my.yaml:2: report .*/file is a file; give the name of a folder"),
        ],
    )
    def test_a_place_that_is_none_is_refused(self, tmp_path, changed, complaint):
        (tmp_path / "folder.mp4").mkdir()
        (tmp_path / "file").touch()
        (tmp_path / "my.yaml").write_text(f"model: tiny-wan\nreport: {tmp_path}/file\n")
        given = {"report": None, **changed}
        for name in ("out", "report"):
            if given.get(name):
                given[name] = tmp_path / given[name]
        if "changes" in given:
            given["changes"] = [given["changes"][0].format(tmp_path)]
        if "config" in given:
            given["config"] = given["config"].format(tmp_path)
            size = [f"generate.{key}" for key in ("height=64", "width=64", "num_frames=5")]
            given["changes"] = size
        with pytest.raises(UserError, match=complaint):
            job(tmp_path, **given)

    def test_a_folder_that_cannot_be_written_to_is_refused(self, tmp_path, monkeypatch):
        real = running.Path  # the tests may run as root, who may write everywhere
        closed = tmp_path / "closed"
        closed.mkdir()
        monkeypatch.setattr("os.access", lambda path, mode: real(path) != closed)
        with pytest.raises(
            UserError,
            match=r"--report .*/closed/new/report: folder .*/closed cannot be written to; give another place",
        ):
            job(tmp_path, report=closed / "new" / "report")
        with pytest.raises(UserError, match=r"--out .*/closed/ball.mp4: folder .*/closed cannot be written to"):
            job(tmp_path, out=closed / "ball.mp4")

    def test_of_several_nodes_only_the_one_that_writes_the_report_must_be_able_to(self, tmp_path):
        (tmp_path / "file").touch()
        nodes = {"nnodes": 2, "master_addr": "node0", "master_port": 29500}
        job(tmp_path, report=tmp_path / "file", launch=Launch(node_rank=1, **nodes))
        with pytest.raises(UserError, match="is a file"):
            job(tmp_path, report=tmp_path / "file", launch=Launch(node_rank=0, **nodes))

    def test_nothing_is_made_by_looking(self, tmp_path):
        job(tmp_path, out=tmp_path / "a" / "ball.mp4", report=tmp_path / "b" / "report")
        assert names(tmp_path) == set()


def test_all_is_well(tmp_path, made):
    made.append("report")
    assert run_job(job(tmp_path), LogFollower(1)) == GenerateResult(tmp_path / "ball.mp4", tmp_path / "report")
    assert (tmp_path / "ball.mp4").read_bytes() == tiny_mp4()
    assert {path.name: path.read_bytes() for path in (tmp_path / "report").iterdir()} == REPORT
    assert names(tmp_path) == {"ball.mp4", "report"}


def test_a_report_without_a_place_is_kept_and_named_and_the_video_is_there(tmp_path, made):
    def take_its_name(work: Path) -> None:
        shutil.rmtree(tmp_path / "report")
        (tmp_path / "report").touch()

    made += ["report", take_its_name]
    asked = job(tmp_path)
    done = run_job(asked, LogFollower(1))
    assert (done.video, done.report) == (asked.out, None)
    assert asked.out.read_bytes() == tiny_mp4()
    (kept,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    assert done.lacking.startswith("the report cannot be put in its place (")
    assert done.lacking.endswith(f"); it is kept: {kept}/report")
    assert {path.name: path.read_bytes() for path in (kept / "report").iterdir()} == REPORT
    assert names(kept) == {"report"}


def test_a_video_without_a_place_is_kept_with_its_report_and_named(tmp_path, made):
    made += ["report", lambda work: (tmp_path / "ball.mp4").mkdir()]
    with pytest.raises(RunFailed, match="the video is made, but cannot be put in its place") as raised:
        run_job(job(tmp_path), LogFollower(1))
    (kept,) = [path for path in tmp_path.iterdir() if path.name.startswith(".ball.dbsp-")]
    assert str(raised.value).endswith(f"it is kept: {kept}/video.mp4 and {kept}/report")
    assert (kept / "video.mp4").read_bytes() == tiny_mp4()
    assert names(kept) == {"video.mp4", "report"}


@pytest.mark.parametrize("left", [b"", tiny_mp4()[:-100]], ids=["nothing", "without its end"])
def test_a_video_that_ffmpeg_could_not_finish_leaves_the_older_one(tmp_path, made, left):
    (tmp_path / "ball.mp4").write_bytes(b"an older video")
    made.append(lambda work: (work / "video.mp4").write_bytes(left))
    with pytest.raises(RunFailed, match=r"could not be written whole; ffmpeg says why in .*ball\.log"):
        run_job(job(tmp_path), LogFollower(1))
    assert (tmp_path / "ball.mp4").read_bytes() == b"an older video"
    assert names(tmp_path) == {"ball.mp4"}


def test_what_is_kept_is_named_again_by_the_next_run_and_never_removed(tmp_path, made):
    with work_folder(tmp_path, "ball") as folder:
        folder.keep("video.mp4").write_bytes(b"hours")
    other = tmp_path / ".ball.dbsp-other.dbsp-abc"
    other.mkdir()
    told: list[str] = []
    run_job(job(tmp_path, report=None), LogFollower(1, on_notice=told.append))
    assert told == [f"dbsp: an earlier run was cut off; what it had made is still in {folder.path}/video.mp4"]
    assert (folder.path / "video.mp4").read_bytes() == b"hours"
    assert other.is_dir(), "it is another video's"


def test_an_older_report_stays_whole_when_the_disk_is_full(tmp_path, monkeypatch):
    """The disk is no real one: the second file's copy fails as on a full one."""
    new, old = tmp_path / "new", tmp_path / "old"
    for folder, content in ((new, b"new"), (old, b"old")):
        folder.mkdir()
        for name in REPORT:
            (folder / name).write_bytes(content)
    copied: list[object] = []

    def full(source: object, target: object) -> None:
        copied.append(source)
        if len(copied) == 2:
            raise OSError(28, "No space left on device")
        target.write(source.read())

    monkeypatch.setattr(shutil, "copyfileobj", full)
    for target in (old, tmp_path / "none"):
        copied.clear()
        with pytest.raises(OSError, match="No space left"):
            put_folder(new, target)
    assert {path.name: path.read_bytes() for path in old.iterdir()} == dict.fromkeys(REPORT, b"old")
    assert names(tmp_path) == {"new", "old"}


@pytest.mark.parametrize("as_json", [True, False])
def test_the_command_says_what_is_lacking_and_exits_with_3(tmp_path, made, dbsp, as_json):
    out = tmp_path / "ball.mp4"
    arguments = ["--config", "tiny-wan", "--prompt", "x", "--out", out, "--report", tmp_path / "report"]
    code, said, err = dbsp("generate", *arguments, *["--json"] * as_json)
    assert code == 3
    lacking = f"the ranks made no report; they say why in {tmp_path / 'ball.log'}"
    assert f"dbsp: the video is {out}, but {lacking}" in err
    if as_json:
        values = json.loads(said)
        assert (values["video"], values["report"], values["lacking"]) == (str(out), None, lacking)
    else:
        assert said.startswith(f"wrote {out} in ")
    assert out.read_bytes() == tiny_mp4()


class TestWords:
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
        warnings = job(tmp_path, config="tiny-wan-trained", prompt=prompt, host="para").warnings
        assert len(warnings) == (unknown is not None)

    def test_the_log_names_the_users_files(self, tmp_path):
        rank = [sys.executable, "-c", "print('(rank 0) mask; from /gone/dbsp.yaml\\n(rank 0) 1/2 [\\r(rank 0) done')"]
        follower = LogFollower(1, reword=lambda text: text.replace("/gone/dbsp.yaml", "my.yaml"))
        run_watched(rank, tmp_path / "log", tmp_path / "ranks", follower)
        said = (tmp_path / "log").read_bytes()
        assert said.endswith(b"(rank 0) mask; from my.yaml\n(rank 0) 1/2 [\r(rank 0) done\n")

    def test_ranks_name_the_users_files(self, tmp_path, monkeypatch, made):
        mine = tmp_path / "my.yaml"
        mine.write_text("model: tiny-wan\n\nmask: {source: synthetic,\n  density: 0.5}\n")
        changes = [f"generate.{size}" for size in ("height=64", "width=64", "num_frames=5")]
        asked = job(tmp_path, config=str(mine), changes=changes)
        told: list[str] = []

        def ranks(command: list[str], log: Path, ranks_folder: Path, watcher: LogFollower, *_: object) -> None:
            file = ranks_folder.parent / "dbsp.yaml"
            lines = file.read_text().splitlines()
            density, height, fps = (
                1 + next(i for i, line in enumerate(lines) if line.strip().startswith(key))
                for key in ("density", "height", "fps")
            )
            watcher.line(f"(rank 0) dbsp: mask synthetic; from {file}")
            watcher.line(f"(rank 0) dbsp: no report in {file.with_name('report')}: full")
            for place in (density, height, fps):
                watcher.line(f"(rank 1) dbsp: error: {file}:{place}: too much")
            watcher.line(f"(rank 1) OSError: {file} is gone")
            told.extend(watcher.last_lines["1"])
            (ranks_folder.parent / "video.mp4").write_bytes(tiny_mp4())

        monkeypatch.setattr(running, "run_watched", ranks)
        run_job(asked, LogFollower(1, on_notice=told.append))
        origin = f"from {mine}, but for generate.height, generate.width, generate.num_frames"
        assert told == [
            f"dbsp: mask synthetic; {origin}",
            f"dbsp: no report in {tmp_path / 'report'}: full",
            f"dbsp: error: {mine}:4: too much",
            "dbsp: error: --set generate.height: too much",
            f"dbsp: error: {mine}: too much",
            f"OSError: {mine} is gone",
        ]
