"""Paths as users write them: home folders, other locales, and paths that the system will not look at."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from dbsp_cli.output import require_apart
from dbsp_core import BlockGrid, BlockMask, save_mask
from dbsp_core.config import DbspConfig
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.files import expand_path, require_file, require_file_path, require_folder_path, write_atomically
from tests.support.repository import child_environment


def test_settings_that_are_paths_expand_a_tilde(monkeypatch):
    monkeypatch.setenv("HOME", "/users/me")
    settings = {"report": "~/r", "machine": "~/c.yaml", "model": "~/w"}
    config = DbspConfig.load({**settings, "generate": {"image": "~/a.png", "last_image": "~/b.png"}})
    given = config.generate
    found = config.report, config.machine, config.model, given.image, given.last_image
    assert found == tuple(f"/users/me/{name}" for name in ("r", "c.yaml", "w", "a.png", "b.png"))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "path '' is empty"),
        ("a\0b", r"path 'a\\x00b' has a NUL character"),
        ("~nobody-at-all/x", "path '~nobody-at-all/x' names a home folder that is not known"),
    ],
)
def test_path_without_a_name_is_rejected(path, message):
    with pytest.raises(UserError, match=message):
        expand_path(path)
    for key in ("report", "machine", "model"):
        with pytest.raises(UserError, match=message):
            DbspConfig.load({key: path})


@pytest.mark.parametrize("config", ["a" * 5000, {"mask": {"source": "file", "path": "a" * 5000}}])
def test_name_that_is_too_long_is_rejected_in_a_short_line(config):
    with pytest.raises(UserError, match=r"cannot be read \(File name too long\)") as raised:
        DbspConfig.load(config)
    assert len(str(raised.value)) < 1500


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.mkdir(), "mask file .* is a folder, not a file; fix"),
        (os.mkfifo, "mask file .* is a pipe or device, not a file; fix"),
        (lambda path: path.symlink_to("gone"), "mask file .* is a link to gone, which does not exist; fix"),
        (lambda path: None, "mask file .* does not exist; fix"),
    ],
)
def test_folder_pipe_device_or_link_is_named_in_the_error(tmp_path, make, message):
    make(tmp_path / "m")
    with pytest.raises(UserError, match=message):
        require_file(tmp_path / "m", "mask file", "fix it so")


@pytest.mark.parametrize("require", [require_file_path, require_folder_path])
def test_output_with_a_name_that_is_too_long_is_rejected(tmp_path, require):
    for path in ("a" * 300, "new/" + "a" * 300, "a" * 300 + "/new", "ä" * 150, "a/" * 2100):
        with pytest.raises(UserError, match=r"^--out .* cannot be written to \(File name too long\)") as raised:
            require(tmp_path / path, "--out")
        assert len(str(raised.value)) < 400


def test_longest_possible_name_is_written(tmp_path):
    """A temporary name that is made of the file's would be longer than the system allows."""
    path = tmp_path / "new" / ("a" * 255)
    require_file_path(path, "--out")
    write_atomically(path, "content")
    assert [one.name for one in path.parent.iterdir()] == [path.name]


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
    files = {"own.yaml": "utf-8", "marked.yaml": "utf-8-sig", "wide.yaml": "utf-16"}
    for name, encoding in files.items():
        (tmp_path / name).write_text(text, encoding=encoding)
    save_mask(tmp_path / "ä.safetensors", BlockMask.dense(2, BlockGrid.uniform(64, 16)))
    command = [sys.executable, "-c", LOAD, *(tmp_path / name for name in files), "tiny-wan-window"]
    done = subprocess.run(command, capture_output=True, env=child_environment() | ASCII, check=False)
    assert done.stdout.decode().split("\n")[:3] == [ascii("ein Bär")] * 3, done.stderr.decode()
    assert done.returncode == 0, done.stderr.decode()
