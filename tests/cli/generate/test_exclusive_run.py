"""What beside a video is another's stays as it is, and two runs never share a log or a report."""

from __future__ import annotations

from pathlib import Path

import pytest

from dbsp_cli.generate import running
from dbsp_cli.generate.exclusive_run import exclusive_run
from dbsp_cli.generate.job import GenerateRequest, resolve
from dbsp_cli.generate.launch import Launch
from dbsp_cli.generate.rank_output import LogFollower
from dbsp_cli.generate.running import run_job
from dbsp_cli.generate.supervisor import run_watched
from dbsp_core.utils.errors import UserError
from tests.cli.generate.tiny_mp4 import tiny_mp4

PRECIOUS = "years of work"


def request(folder: Path, video: str = "clip.mp4", **changed: object) -> GenerateRequest:
    return GenerateRequest(**{"config": "tiny-wan", "prompt": "x", "out": folder / video, **changed})


@pytest.fixture
def no_ranks(monkeypatch):
    """What is called in place of ranks, with the run's folder."""
    instead: list = []

    def ranks(command: list[str], log: Path, ranks_folder: Path, *_: object) -> None:
        (ranks_folder.parent / "video.mp4").write_bytes(tiny_mp4())
        for act in instead:
            act(ranks_folder.parent)

    monkeypatch.setattr(running, "run_watched", ranks)
    monkeypatch.setattr(running, "make_tiny", lambda *_: None)
    monkeypatch.setattr(running, "silence_libraries", lambda: None)
    return instead


def test_a_log_that_no_run_has_written_is_kept_and_refused_before(tmp_path):
    log = tmp_path / "clip.log"
    log.write_text(PRECIOUS)
    with pytest.raises(UserError, match=r"clip.log, where .*, is not a log of db-SP's; move it away, or give another"):
        resolve(request(tmp_path))
    with pytest.raises(UserError, match="is not a log"):  # nor where it came later
        run_watched(["true"], log, tmp_path / "ranks", LogFollower(1))
    assert log.read_text() == PRECIOUS
    log.unlink()
    log.mkdir()
    with pytest.raises(UserError, match="is a folder; give another file with --out"):
        resolve(request(tmp_path))


def test_the_log_of_the_last_run_is_replaced(tmp_path):
    log = tmp_path / "clip.log"
    for word in ("first", "second"):
        run_watched(["echo", word], log, tmp_path / "ranks", LogFollower(1))
        resolve(request(tmp_path))
    assert log.read_text().endswith("second\n")
    assert "first" not in log.read_text()


@pytest.mark.parametrize("linked", [False, True])
def test_a_lock_that_is_not_ours_is_neither_emptied_nor_removed(tmp_path, no_ranks, linked):
    lock, mine = tmp_path / ".clip.lock", tmp_path / "mine.txt"
    mine.write_text(PRECIOUS)
    lock.symlink_to(mine) if linked else lock.write_text(PRECIOUS)
    with pytest.raises(UserError, match=r"\.clip\.lock is not a lock of db-SP's; remove it, or give another place"):
        run_job(resolve(request(tmp_path)), LogFollower(1))
    assert lock.read_text() == mine.read_text() == PRECIOUS
    assert lock.is_symlink() == linked


def test_a_lock_that_a_killed_run_has_left_is_taken(tmp_path, no_ranks):
    (tmp_path / ".clip.lock").write_text("process 4711 on a-machine")
    run_job(resolve(request(tmp_path)), LogFollower(1))
    assert {path.name for path in tmp_path.iterdir()} == {"clip.mp4"}


def test_a_file_that_has_taken_the_locks_name_meanwhile_is_not_removed(tmp_path):
    lock = tmp_path / ".clip.lock"
    with exclusive_run(lock, "a video", "--out") as known:
        assert known
        lock.unlink()
        lock.write_text(PRECIOUS)
    assert lock.read_text() == PRECIOUS


def test_two_runs_with_one_report_are_kept_apart(tmp_path, no_ranks):
    (tmp_path / "link").symlink_to(tmp_path / "report")
    said: list[str] = []

    def another_run(work: Path) -> None:
        no_ranks.clear()
        with pytest.raises(UserError) as refused:
            run_job(resolve(request(tmp_path, "other.mp4", report=tmp_path / "link")), LogFollower(1))
        said.append(str(refused.value))
        run_job(resolve(request(tmp_path, "third.mp4", report=tmp_path / "another")), LogFollower(1))

    no_ranks.append(another_run)
    run_job(resolve(request(tmp_path, report=tmp_path / "report")), LogFollower(1))
    assert said[0].startswith(f"another run is making the report in {tmp_path / 'link'} (process ")
    assert said[0].endswith("; wait for it, or give another place with --report")
    assert {path.name for path in tmp_path.iterdir()} == {"clip.mp4", "third.mp4", "link"}, "no lock, no empty folder"


def test_a_node_that_writes_no_report_does_not_lock_its_folder(tmp_path, no_ranks):
    nodes = {"nnodes": 2, "master_addr": "node0", "master_port": 29500}
    seen: list[bool] = []
    no_ranks.append(lambda work: seen.append((tmp_path / "report").exists()))
    for node in (0, 1):
        launch = Launch(node_rank=node, **nodes)
        run_job(resolve(request(tmp_path, launch=launch, report=tmp_path / "report")), LogFollower(1))
    assert seen == [True, False]


def test_a_video_goes_where_a_link_leads(tmp_path, no_ranks):
    (tmp_path / "clip.mp4").symlink_to(tmp_path / "real.mp4")
    run_job(resolve(request(tmp_path)), LogFollower(1))
    assert (tmp_path / "clip.mp4").is_symlink()
    assert (tmp_path / "real.mp4").read_bytes() == tiny_mp4()
