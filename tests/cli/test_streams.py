"""Standard streams that are not UTF-8, or closed, and text that is not for a terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from dbsp_cli.output import TextTable, as_text
from dbsp_core import BlockGrid, BlockMask, save_mask
from tests.support.programs import run
from tests.support.repository import child_environment

GRID = BlockGrid(tokens=64, text_tokens=0, block_q=16, block_k=16)
ENCODINGS = {
    "latin-1": {"PYTHONIOENCODING": "latin-1"},
    "ascii": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}
"""Environments in which standard output has an encoding."""
ESCAPES = "\x1b]0;title\x07\x1b[31m"
FORKED = """
import json, os, sys
closed, encoding, *sys.argv[1:] = json.loads(sys.argv[1])
for number in closed:
    os.close(number)
    setattr(sys, ("stdin", "stdout", "stderr")[number], None)
if encoding:
    sys.stdout.reconfigure(encoding=encoding, errors="surrogateescape")
from dbsp_cli.entry import dbsp
dbsp()
"""
"""Begins with what an interpreter makes of closed streams, or of an encoding."""


def forked(*arguments: object, closed: tuple[int, ...] = (), encoding: str = "", **options: object):
    """A command that begins with streams closed, as by `>&-`, or with an encoding. options: of `subprocess.run`"""
    asked = json.dumps([closed, encoding, *map(str, arguments)])
    return run([sys.executable, "-c", FORKED, asked], text=False, env=child_environment(), **options)


def started(*arguments: object, closed: tuple[int, ...] = (), encoding: str = "", **options: object):
    """The same in an interpreter of its own."""

    def close():
        for number in closed:
            os.close(number)

    environment = {k: v for k, v in child_environment().items() if k not in ("PYTHONIOENCODING", "PYTHONUTF8")}
    environment |= ENCODINGS.get(encoding, {})
    command = [sys.executable, "-m", "dbsp_cli", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    given = {"env": environment, "preexec_fn": close, "timeout": 120, "check": False, **pipes, **options}
    return subprocess.run(command, **given)


each_start = pytest.mark.parametrize("start", [forked, pytest.param(started, marks=pytest.mark.long)])


@pytest.fixture
def mask_file(tmp_path):
    save_mask(tmp_path / "m.safetensors", BlockMask.dense(2, GRID))
    return tmp_path / "m.safetensors"


@each_start
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_what_an_encoding_lacks_is_replaced(mask_file, start, encoding):
    done = start("plan", mask_file, "--gpus", 2, encoding=encoding)
    assert (done.returncode, done.stderr) == (0, b"")
    text = done.stdout.decode(encoding)
    assert "2 heads, 4" in text
    assert "?_s" in text, "ρ_s"


@each_start
@pytest.mark.parametrize(("code", "closed"), [(0, (0, 1)), (2, (0, 2)), (0, (2,)), (2, (1,))])
def test_a_closed_stream_is_no_hindrance(mask_file, tmp_path, start, code, closed):
    """Of a plan, and of a mistake. Its number is not given to a file that is opened later."""
    (tmp_path / "other").mkdir()
    target = tmp_path / "other" / "plan.png"
    asked = ["plan", mask_file, "--gpus", "2", "--strategy", "U2R1", "--picture", target] if code == 0 else ["plan"]
    done = start(*asked, closed=closed)
    assert done.returncode == code, done
    assert b"Traceback" not in done.stderr
    assert (b"U2R1" in done.stdout) == (1 not in closed and code == 0)
    assert target.is_file() == (code == 0)
    assert not target.is_file() or target.read_bytes().startswith(b"\x89PNG")


@each_start
def test_children_have_streams_too(tmp_path, start):
    """A command that is run by `masks record` inherits what represents a closed stream."""
    child = "import os; os.fstat(1); os.write(1, b'said'); print('said')"
    assert start("masks", "record", tmp_path / "r", "--", sys.executable, "-c", child, closed=(1,)).returncode == 0


def test_tables_show_control_characters():
    table = TextTable(ESCAPES, ("what", ESCAPES), [(ESCAPES, "ρ_s")], ESCAPES, left=(ESCAPES,))
    for width in (None, 40):
        text = as_text(table, width)
        assert "\x1b" not in text
        assert "\x07" not in text
        assert "\\x1b]0;title\\x07\\x1b[31m" in text
        assert "ρ_s" in text


def test_nothing_in_a_file_reaches_the_terminal_as_it_is(dbsp, tmp_path):
    """Names of files too, as an archive may bring them."""
    folder = tmp_path / f"r{ESCAPES[1:]}\x1b"
    folder.mkdir()
    save_mask(folder / "0.safetensors", BlockMask.dense(2, GRID))
    passes = [{"generation": 0, "step": 0, "cfg_branch": 0, "masks": {"0": "0"}}]
    index = {"layers": 1, "passes": passes, "stopped": ESCAPES}
    (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")
    for asked in (
        ("masks", "info", folder, "--gpus", 2),
        ("masks", "info", folder / "0.safetensors", "--gpus", 2),
        ("masks", "info", folder / "gone", "--gpus", 2),
        ("plan", folder / "0.safetensors", "--gpus", 2),
        ("report", folder / "index.json"),
    ):
        _, out, err = dbsp(*asked)
        assert "\x1b" not in out + err, asked
        assert "\\x1b" in out + err or asked[0] == "plan"
