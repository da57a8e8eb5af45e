"""Files that are written whole keep what the user has settled: modes, umask, links."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dbsp_core.masks.mask_writer import ByteTensor, safetensors_pieces
from dbsp_core.utils.files import require_file_path, write_atomically


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


def test_failed_write_leaves_the_old_file_alone(tmp_path):
    (tmp_path / "file").write_text("old")
    tensors = {"mask": ByteTensor((4,), [b"half"[:2]])}
    with pytest.raises(ValueError, match="was given 2 bytes"):
        write_atomically(tmp_path / "file", safetensors_pieces(tensors, {}))
    assert (tmp_path / "file").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
