"""Every command looks at where its results are to go before it does anything."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from unittest import mock

import pytest

from dbsp_core.utils.errors import UserError
from dbsp_core.utils.files import require_file_path

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
    monkeypatch.setattr(f"dbsp_cli.commands.{command.split()[0]}.{name}", work)
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


def test_link_into_a_file_and_unwritable_pipe_are_rejected(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "file" / "result")
    with pytest.raises(UserError, match="file is a file, not a folder"):
        require_file_path(tmp_path / "link", "--out")
    os.mkfifo(tmp_path / "pipe")
    require_file_path(tmp_path / "pipe", "--out")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(UserError, match=r"--out .*pipe cannot be written to; give another path"):
        require_file_path(tmp_path / "pipe", "--out")
