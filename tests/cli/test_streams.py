"""Standard streams that are not UTF-8, or closed, and text that is not for a terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from dbsp_cli.output import TextTable, as_text
from dbsp_core import BlockGrid, BlockMask, save_mask
from tests.support.repository import child_environment

GRID = BlockGrid(tokens=64, text_tokens=0, block_q=16, block_k=16)
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
ENCODINGS = {"latin-1": {"PYTHONIOENCODING": "latin-1"}, "a C locale": ASCII}
ESCAPES = "\x1b]0;title\x07\x1b[31m"


def started(*arguments: object, **options: object) -> subprocess.CompletedProcess[bytes]:
    """A command in an interpreter of its own. options: of `subprocess.run`"""
    environment = {k: v for k, v in child_environment().items() if k not in ("PYTHONIOENCODING", "PYTHONUTF8")}
    environment |= options.pop("env", {})
    command = [sys.executable, "-m", "dbsp_cli", *map(str, arguments)]
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    return subprocess.run(command, env=environment, timeout=120, check=False, **given)


@pytest.fixture
def mask_file(tmp_path):
    save_mask(tmp_path / "m.safetensors", BlockMask.dense(2, GRID))
    return tmp_path / "m.safetensors"


@pytest.mark.parametrize("encoding", [pytest.param("latin-1", marks=pytest.mark.long), "a C locale"])
def test_what_an_encoding_lacks_is_replaced(mask_file, encoding):
    done = started("plan", mask_file, "--gpus", 2, env=ENCODINGS[encoding])
    assert (done.returncode, done.stderr) == (0, b"")
    text = done.stdout.decode(ENCODINGS[encoding].get("PYTHONIOENCODING", "ascii"))
    assert "2 heads, 4" in text
    assert "?_s" in text, "ρ_s"


CLOSED = [
    (0, [0, 1]),
    (2, [0, 2]),
    pytest.param(0, [2], marks=pytest.mark.long),
    pytest.param(2, [1], marks=pytest.mark.long),
]
"""Exit status, and the streams that are closed."""


def closing(*numbers):
    """Arguments for a process that is started with streams closed, as by `>&-`."""

    def close():
        for number in numbers:
            os.close(number)

    return {"stdin": subprocess.DEVNULL, "preexec_fn": close, "stdout": None, "stderr": None}


@pytest.mark.parametrize(("code", "closed"), CLOSED)
def test_a_closed_stream_is_no_hindrance(mask_file, tmp_path, code, closed):
    """Of a plan, and of a mistake. Its number is not given to a file that is opened later."""
    (tmp_path / "other").mkdir()
    target = tmp_path / "other" / "plan.png"
    asked = ["plan", mask_file, "--gpus", "2", "--strategy", "U2R1", "--picture", target] if code == 0 else ["plan"]
    heard = {name: (tmp_path / name).open("wb") for name in ("stdout", "stderr")}
    options = closing(*closed)
    options |= {name: file for at, (name, file) in enumerate(heard.items(), 1) if at not in closed}
    done = started(*asked, **options)
    for file in heard.values():
        file.close()
    said = {name: (tmp_path / name).read_bytes() for name in heard}
    assert done.returncode == code, said
    assert b"Traceback" not in said["stderr"]
    assert (b"U2R1" in said["stdout"]) == (1 not in closed and code == 0)
    assert target.is_file() == (code == 0)
    assert not target.is_file() or target.read_bytes().startswith(b"\x89PNG")


def test_children_have_streams_too(tmp_path):
    """A command that is run by `masks record` inherits what represents a closed stream."""
    child = "import os; os.fstat(1); os.write(1, b'said'); print('said')"
    done = started("masks", "record", tmp_path / "r", "--", sys.executable, "-c", child, **closing(1), env={})
    assert done.returncode == 0


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
