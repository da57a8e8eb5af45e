"""Files: written whole or not at all, where the user wants them, and paths that cannot be."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest

from dbsp_cli.output import require_apart
from dbsp_core import BlockGrid, BlockMask, save_mask
from dbsp_core.config import DbspConfig
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.files import require_file, require_file_path, require_folder_path, write_atomically
from tests.support.repository import child_environment


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(("umask", "expected"), [(0o077, 0o600), (0o002, 0o664)])
def test_new_file_has_the_mode_of_the_umask_and_a_replaced_one_its_own(tmp_path, umask, expected):
    file, before = tmp_path / "report.json", os.umask(umask)
    try:
        write_atomically(file, "a prompt")
    finally:
        os.umask(before)
    assert mode(file) == expected
    file.chmod(0o640)
    write_atomically(file, "new")
    assert (file.read_text(), mode(file)) == ("new", 0o640)


def test_link_is_kept_and_its_target_replaced(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk/real")
    for content in ("first", "second"):
        write_atomically(tmp_path / "link", content)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "disk" / "real").read_text() == content
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["real"]


def test_pipe_is_written_to_and_not_replaced(tmp_path):
    """Guards against replacing it, as root could replace /dev/null."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    require_file_path(pipe, "--out")
    write_atomically(pipe, "a report")
    assert os.read(reader, 100) == b"a report"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_failed_write_leaves_the_old_file_alone(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("old")
    monkeypatch.setattr("os.replace", mock.Mock(side_effect=OSError("the disk is full")))
    with pytest.raises(OSError, match="the disk is full"):
        write_atomically(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


COMMANDS = {
    "tiny": ("make_tiny", ["tiny", "wan", "PATH"], "FOLDER"),
    "masks convert": ("convert_masks", ["masks", "convert", "in.pt", "PATH", "tokens=64"], "OUT"),
    "masks fit": ("fit_recording", ["masks", "fit", "PATH", "run"], "OUT"),
    "masks info": ("MaskSeries", ["masks", "info", "in.safetensors", "--picture", "PATH"], "--picture"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_unwritable_folder_is_rejected_before_any_work(tmp_path, monkeypatch, dbsp, command):
    name, line, option = COMMANDS[command]
    work = mock.Mock(side_effect=AssertionError("the work has begun"))
    work.read = work
    module = "tiny_models" if command == "tiny" else f"commands.{command.split()[0]}"
    monkeypatch.setattr(f"dbsp_cli.{module}.{name}", work)
    closed, make_folder = tmp_path / "closed", tempfile.mkdtemp
    closed.mkdir()
    target = closed / "new" / "result"

    def make_temporary(dir: Path, prefix: str) -> str:
        if dir == closed:  # root may write everywhere
            raise PermissionError(errno.EACCES, "Permission denied")
        return make_folder(dir=dir, prefix=prefix)

    monkeypatch.setattr("tempfile.mkdtemp", make_temporary)
    code, _, err = dbsp(*[str(target) if part == "PATH" else part for part in line])
    assert (code, err.count("\n")) == (2, 1), err
    assert f"{option} {target} cannot be written to (Permission denied); give another path, or make {closed} w" in err
    (tmp_path / "file").touch()
    code, _, err = dbsp(*[str(tmp_path / "file" / "result") if part == "PATH" else part for part in line])
    assert code == 2
    assert f"{tmp_path / 'file'} is a file, not a folder; give another path" in err
    assert {path.name for path in tmp_path.iterdir()} == {"closed", "file"}
    assert list(closed.iterdir()) == []


def test_settings_that_are_paths_expand_a_tilde(monkeypatch):
    monkeypatch.setenv("HOME", "/users/me")
    settings = {"report": "~/r", "machine": "~/c.yaml", "model": "~/w"}
    config = DbspConfig.load({**settings, "generate": {"image": "~/a.png", "last_image": "~/b.png"}})
    given = config.generate
    found = config.report, config.machine, config.model, given.image, given.last_image
    assert found == tuple(f"/users/me/{name}" for name in ("r", "c.yaml", "w", "a.png", "b.png"))


def test_path_without_a_name_is_rejected():
    for key in ("report", "machine", "model"):
        with pytest.raises(UserError, match="path '' is empty"):
            DbspConfig.load({key: ""})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), "mask file .* is a folder, not a file; fix"),
        (os.mkfifo, "mask file .* is a pipe or device, not a file; fix"),
        (lambda path: None, "mask file .* does not exist; fix"),
    ],
)
def test_folder_pipe_or_device_is_named_in_the_error(tmp_path, make, message):
    make(tmp_path / "m")
    with pytest.raises(UserError, match=message):
        require_file(tmp_path / "m", "mask file", "fix it so")


@pytest.mark.parametrize("require", [require_file_path, require_folder_path])
def test_output_with_a_name_that_is_too_long_is_rejected(tmp_path, require):
    for path in ("a" * 300, "ä" * 150, "a/" * 2100):
        with pytest.raises(UserError, match=r"^--out .* cannot be written to \(File name too long\)") as raised:
            require(tmp_path / path, "--out")
        assert len(str(raised.value)) < 400


def test_two_results_with_one_path_are_rejected(tmp_path):
    (tmp_path / "link").symlink_to("v.mp4")
    video = {"--out": tmp_path / "v.mp4"}
    for other in ("v.mp4", "link", "x/../v.mp4"):
        with pytest.raises(UserError, match=r"^--out and --report are the same path, .*; give another --out"):
            require_apart(video, {"--report": tmp_path / other})
        with pytest.raises(UserError, match=r"^--out and the picture are the same path"):
            require_apart(video, inputs={"the picture": tmp_path / other})
    require_apart(video, {"--report": tmp_path}, {"IN": tmp_path / "w.mp4", "again": tmp_path / "w.mp4"})


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
LOAD = """
import sys
from dbsp_core.config import DbspConfig
for name in sys.argv[1:]:
    print(ascii(DbspConfig.load(name).generate.prompt))
"""


def test_yaml_is_read_as_utf_8_in_an_ascii_locale(tmp_path):
    """Checks a prompt, a file whose name has UTF-8's bytes, and a shipped configuration."""
    text = f"generate: {{prompt: ein Bär}}\nmask: {{source: file, path: {tmp_path}/ä.safetensors}}\n"
    files = {"own.yaml": "utf-8", "marked.yaml": "utf-8-sig"}
    for name, encoding in files.items():
        (tmp_path / name).write_text(text, encoding=encoding)
    save_mask(tmp_path / "ä.safetensors", BlockMask.dense(2, BlockGrid.uniform(64, 16)))
    command = [sys.executable, "-c", LOAD, *(tmp_path / name for name in files), "tiny-wan-window"]
    done = subprocess.run(command, capture_output=True, env=child_environment() | ASCII, check=False)
    assert done.stdout.decode().split("\n")[:2] == [ascii("ein Bär")] * 2, done.stderr.decode()
    assert done.returncode == 0, done.stderr.decode()
