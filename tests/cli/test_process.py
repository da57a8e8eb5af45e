"""The process of the command: how it starts and ends, where it finds modules, its standard streams, and tables."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.cells import cell_len

import dbsp_cli
import dbsp_core
from dbsp_cli.commands.doctor import Importable
from dbsp_cli.output import TextTable, as_text, print_tables
from dbsp_core import BlockGrid, BlockMask, save_mask
from dbsp_core.reports.observer import RunObserver
from dbsp_diffusers import report_hook
from tests.support.repository import ROOT, child_environment

SLOW = "print('importing', flush=True)\nimport time\ntime.sleep(600)\n"


@pytest.mark.parametrize("ignored", [False, True])
def test_an_interrupt_during_imports_is_one_line(tmp_path, ignored):
    """Replaces torch by a stub that says when it is imported, and takes for ever."""
    (tmp_path / "torch.py").write_text(SLOW if not ignored else SLOW.replace("600", "0") + "raise SystemExit(5)\n")
    run = subprocess.Popen(
        [sys.executable, "-c", "from dbsp_cli.entry import dbsp; dbsp()", "--help"],
        env=child_environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.SIG_DFL),
    )
    assert run.stdout is not None
    assert run.stdout.readline() == "importing\n"
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=120)
    assert (run.returncode, said) == ((5, "") if ignored else (130, "dbsp: interrupted\n"))


def test_an_interrupt_after_the_imports_is_one_line_too(dbsp, monkeypatch):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr("dbsp_cli.commands.doctor.run_checks", interrupted)
    assert dbsp("doctor") == (130, "", "dbsp: interrupted\n")


def test_the_installed_commands_are_there():
    tomllib = pytest.importorskip("tomllib", reason="from Python 3.11 on")
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert set(scripts) == {"dbsp"}
    for target in scripts.values():
        module, name = target.split(":")
        assert callable(getattr(import_module(module), name))


class TestFaultsOfOurOwn:
    """They go through as they are: Python then shows the traceback and exits with 1."""

    def test_of_dbsp(self, dbsp, monkeypatch):
        def broken():
            raise IndexError("a fault")

        monkeypatch.setattr("dbsp_cli.commands.doctor.run_checks", broken)
        with pytest.raises(IndexError, match="a fault"):
            dbsp("doctor")

    @pytest.mark.parametrize(("error", "ours"), [(IndexError("a fault"), True), (OSError("the disk is full"), False)])
    def test_of_making_a_report_does_not_end_what_has_succeeded(self, monkeypatch, capfd, error, ours):
        monkeypatch.setattr(report_hook, "make_report", lambda *_: (_ for _ in ()).throw(error))
        report_hook.report_or_say_why_not(
            [SimpleNamespace(observers=(RunObserver("there"),), layers=1, records={})], "m", "para"
        )
        *before, last = capfd.readouterr().err.splitlines()
        assert last == f"dbsp: no report in there: {error}"
        assert ("Traceback (most recent call last):" in before) is ours


HELD = """
import atexit, sys, threading, time

class Held:
    def __del__(self):
        print("taken apart", flush=True)

held = Held()
"""
QUICKLY = "from dbsp_cli.entry import fast_exit\n" + HELD + "with fast_exit():\n    "


def python(script: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [sys.executable, "-c", script], stdout=stdout, stderr=subprocess.PIPE, text=True, env=variables
    )


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ("pass", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit(True)", 1, ""),
        ("sys.exit(-1)", 255, ""),
        ("sys.exit('no video')", 1, "no video\n"),
        ("raise ValueError('a fault')", 1, "ValueError: a fault\n"),
    ],
)
def test_exit_codes_and_words_are_the_interpreters(ends, code, said):
    quick, usual = python(QUICKLY + ends), python(HELD + ends)
    assert (quick.returncode, usual.returncode) == (code, code)
    assert quick.stderr.endswith(said)
    assert quick.stderr.splitlines()[-1:] == usual.stderr.splitlines()[-1:]
    assert (quick.stdout, usual.stdout) == ("", "taken apart\n")


def test_threads_are_waited_for_atexit_functions_called_and_output_is_written():
    done = python(
        QUICKLY
        + "atexit.register(print, 'second', end='')\n    "
        + "threading.Thread(target=lambda: (time.sleep(0.2), print('first'))).start()\n    "
        + "raise SystemExit(4)"
    )
    assert (done.returncode, done.stdout) == (4, "first\nsecond")


def test_an_interrupt_is_the_interpreters():
    done = python(QUICKLY + "raise KeyboardInterrupt")
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "taken apart\n")


def test_output_that_nobody_takes_is_the_interpreters():
    reader, writer = os.pipe()
    os.close(reader)
    done = python(QUICKLY + "print('x')", writer)
    os.close(writer)
    assert done.returncode == 120
    assert "BrokenPipeError" in done.stderr


PROGRAM = Path(dbsp_cli.__file__).with_name("__main__.py")
"""What torchrun runs in each rank."""
LOOKS = """
import sys

class Finder:
    def find_spec(self, name, *_):
        if name == "dbsp_cli.cli":
            print([path for path in sys.path if path.endswith("dbsp_cli")])

sys.meta_path.insert(0, Finder())
"""
"""Says, while the command is being imported, whether the folder of its program is searched."""
NAMES = ("random", "queue", "logging", "token", "runpy", "ctypes", "torch", "dbsp_cli", "dbsp_core")


@pytest.fixture
def folder(tmp_path):
    """Makes a user's folder, with files that are called as modules are."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the file of the user ran')\n", encoding="utf-8")
    return tmp_path


def version_in(folder, *path):
    return subprocess.run(
        [sys.executable, PROGRAM, "--version"],
        cwd=folder,
        env=child_environment(*path),
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_ranks_find_pythons_own_modules_and_search_no_folder_of_db_sp(folder, tmp_path_factory):
    """Guards against `import output` that finds `dbsp_cli.output`."""
    looking = tmp_path_factory.mktemp("looking")
    (looking / "sitecustomize.py").write_text(LOOKS)
    done = version_in(folder, looking)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "db-SP " + dbsp_core.__version__]


def test_modules_of_the_current_folder_are_found_by_pythonpath_alone(folder):
    assert "the file of the user ran" in version_in(folder, folder).stderr


def test_doctor_tries_imports_without_them(folder, monkeypatch):
    monkeypatch.chdir(folder)
    check = Importable("queues", ("json",), "xdit", "import queue, random").check()
    assert check.ok, check.detail


GRID = BlockGrid(tokens=64, text_tokens=0, block_q=16, block_k=16)
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""Environment in which standard output has the encoding ASCII."""
ESCAPES = "\x1b]0;title\x07\x1b[31m"


def start(*arguments: object, closed: tuple[int, ...] = (), **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Runs a command that begins with streams closed, as by `>&-`, or with other variables."""

    def close() -> None:
        for number in closed:
            os.close(number)

    environment = {k: v for k, v in child_environment().items() if k not in ("PYTHONIOENCODING", "PYTHONUTF8")}
    environment |= variables
    command = [sys.executable, "-m", "dbsp_cli", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.run(command, env=environment, preexec_fn=close, timeout=120, check=False, **pipes)


@pytest.fixture
def mask_file(tmp_path):
    save_mask(tmp_path / "m.safetensors", BlockMask.dense(2, GRID))
    return tmp_path / "m.safetensors"


def test_what_an_encoding_lacks_is_replaced(mask_file):
    done = start("plan", mask_file, "--gpus", 2, **ASCII)
    assert (done.returncode, done.stderr) == (0, b"")
    text = done.stdout.decode("ascii")
    assert "2 heads, 4" in text
    assert "?_s" in text, "ρ_s"


@pytest.mark.parametrize(("code", "closed"), [(0, (0, 1)), (2, (0, 2))])
def test_a_closed_stream_is_no_hindrance(mask_file, tmp_path, code, closed):
    """Tries a plan and a mistake. A stream's number is not given to a file that is opened later."""
    (tmp_path / "other").mkdir()
    target = tmp_path / "other" / "masks.png"
    asked = ["masks", "info", mask_file, "--gpus", "2", "--picture", target] if code == 0 else ["masks", "info"]
    done = start(*asked, closed=closed)
    assert done.returncode == code, done
    assert b"Traceback" not in done.stderr
    assert (b"U2R1" in done.stdout) == (1 not in closed and code == 0)
    assert target.is_file() == (code == 0)
    assert not target.is_file() or target.read_bytes().startswith(b"\x89PNG")


def test_children_have_streams_too(tmp_path):
    """Runs a command by `masks record`, which inherits what represents a closed stream."""
    child = "import os; os.fstat(1); os.write(1, b'said'); print('said')"
    assert start("masks", "record", tmp_path / "r", "--", sys.executable, "-c", child, closed=(1,)).returncode == 0


COLUMNS = ("strategy", "planner", "exchange", "exposed", "end to end")
ROWS = [("U8R1", "contiguous", "123456.7", "+323.5%", "1.0"), ("U4R2", "[red]dbsp[/b]", "1.2", "+0.1%", "98765.4")]
TABLE = TextTable("a title", COLUMNS, ROWS, "a caption", left=COLUMNS[:2], spare=("exposed", "exchange"))


def test_all_of_it_where_there_is_room():
    assert as_text(TABLE).splitlines() == [
        "a title",
        "strategy  planner        exchange  exposed  end to end",
        "--------  -------------  --------  -------  ----------",
        "U8R1      contiguous     123456.7  +323.5%         1.0",
        "U4R2      [red]dbsp[/b]       1.2    +0.1%     98765.4",
        "a caption",
    ]


def test_columns_to_spare_go_first_and_are_named():
    lines = as_text(TABLE, 45).splitlines()
    assert lines[1].split() == ["strategy", "planner", "exchange", "end", "to", "end"]
    assert lines[-2] == "(a wider terminal shows exposed as well)"
    assert "exchange" not in as_text(TABLE, 36).splitlines()[1]


@pytest.mark.parametrize("width", [30, 36, 45, 60, 200])
def test_nothing_is_cut_and_nothing_is_wider(width):
    table = TextTable("", ("what", "why"), [("数字", "a/long/path/without/any/space"), ("b", "some words that wrap")])
    for one in (table, TABLE):
        lines = as_text(one, width).splitlines()
        grid = [line for line in lines if line not in (one.title, one.caption) and not line.startswith("(")]
        assert max(map(cell_len, grid)) <= width
        shown = "".join("".join(grid).split())
        kept = [name for name in one.columns if name not in one.spare]
        for row in one.rows:
            cells = dict(zip(one.columns, row, strict=True))
            assert all("".join(cells[name].split())[:8] in shown for name in kept), shown
    words = "".join(as_text(TextTable("", ("a", "b"), [("x", "one two three four five")], left="b"), 12).split())
    assert words.endswith("x" + "one" + "two" + "three" + "four" + "five")


@pytest.mark.parametrize("terminal", [True, False])
def test_only_a_terminal_is_narrow(monkeypatch, capsys, terminal):
    monkeypatch.setenv("COLUMNS", "45")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    print_tables([TABLE])
    assert ("exposed" in capsys.readouterr().out.splitlines()[1]) is not terminal


def test_tables_show_control_characters():
    table = TextTable(ESCAPES, ("what", ESCAPES), [(ESCAPES, "ρ_s")], ESCAPES, left=(ESCAPES,))
    for width in (None, 40):
        text = as_text(table, width)
        assert "\x1b" not in text
        assert "\x07" not in text
        assert "\\x1b]0;title\\x07\\x1b[31m" in text
        assert "ρ_s" in text


def test_nothing_in_a_file_reaches_the_terminal_as_it_is(dbsp, tmp_path):
    """Checks names of files too, as an archive may bring them."""
    folder = tmp_path / f"r{ESCAPES[1:]}\x1b"
    folder.mkdir()
    save_mask(folder / "0.safetensors", [BlockMask.dense(2, GRID)])
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
        assert "\\x1b" in out + err, asked
