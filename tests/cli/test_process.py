"""The process of the command: how it starts and ends, where it finds modules, its standard streams, and tables."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import dbsp_cli
import dbsp_core
from dbsp_cli.commands.doctor import Importable
from dbsp_cli.output import TextTable, as_text
from dbsp_core import BlockGrid, BlockMask, save_mask
from tests.support.repository import child_environment

GRID = BlockGrid(tokens=64, text_tokens=0, block_q=16, block_k=16)
PROGRAM = Path(dbsp_cli.__file__).with_name("__main__.py")
"""What torchrun runs in each rank."""


def test_an_interrupt_during_imports_is_one_line(tmp_path):
    """Replaces torch by a stub that says when it is imported, and takes for ever."""
    (tmp_path / "torch.py").write_text("print('importing', flush=True)\nimport time\ntime.sleep(600)\n")
    run = subprocess.Popen(
        [sys.executable, "-c", "from dbsp_cli.entry import dbsp; dbsp()", "--help"],
        env=child_environment(tmp_path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert run.stdout is not None
    assert run.stdout.readline() == "importing\n"
    run.send_signal(signal.SIGINT)
    _, said = run.communicate(timeout=120)
    assert (run.returncode, said) == (130, "dbsp: interrupted\n")


def test_a_later_interrupt_is_one_line_and_a_fault_of_our_own_is_a_traceback(dbsp, monkeypatch):
    def ends_with(error):
        raise error

    monkeypatch.setattr("dbsp_cli.commands.doctor.run_checks", lambda: ends_with(KeyboardInterrupt()))
    assert dbsp("doctor") == (130, "", "dbsp: interrupted\n")
    monkeypatch.setattr("dbsp_cli.commands.doctor.run_checks", lambda: ends_with(IndexError("a fault")))
    with pytest.raises(IndexError, match="a fault"):
        dbsp("doctor")


HELD = """
import atexit, sys, threading, time

class Held:
    def __del__(self):
        print("taken apart", flush=True)

held = Held()
"""
QUICKLY = "from dbsp_cli.entry import fast_exit\n" + HELD + "with fast_exit():\n    "
THREADS = (
    "atexit.register(print, 'second', end='')\n    "
    "threading.Thread(target=lambda: (time.sleep(0.2), print('first'))).start()\n    "
    "raise SystemExit(4)"
)


@pytest.mark.parametrize(
    ("ends", "code", "out", "said"),
    [
        ("sys.exit(-1)", 255, "", ""),
        ("sys.exit('no video')", 1, "", "no video\n"),
        ("raise ValueError('a fault')", 1, "", "ValueError: a fault\n"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "taken apart\n", "KeyboardInterrupt\n"),
        (THREADS, 4, "first\nsecond", ""),
    ],
)
def test_a_program_ends_at_once_after_threads_and_atexit_functions(ends, code, out, said):
    done = subprocess.run([sys.executable, "-c", QUICKLY + ends], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (code, out)
    assert done.stderr.endswith(said)


LOOKS = """
import sys

class Finder:
    def find_spec(self, name, *_):
        if name == "dbsp_cli.cli":
            print([path for path in sys.path if path.endswith("dbsp_cli")])

sys.meta_path.insert(0, Finder())
"""
"""Says, while the command is being imported, whether the folder of its program is searched."""


def test_files_of_the_current_folder_and_of_db_sp_are_not_taken_for_modules(tmp_path, monkeypatch):
    """Guards against `import output` that finds `dbsp_cli.output`, and a user's file that is called as a module is."""
    (tmp_path / "looking").mkdir()
    (tmp_path / "looking" / "sitecustomize.py").write_text(LOOKS)
    for name in ("random", "queue", "logging", "token", "torch", "dbsp_cli", "dbsp_core"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the file of the user ran')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    environment = child_environment(tmp_path / "looking")
    command = [sys.executable, PROGRAM, "--version"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["[]", "db-SP " + dbsp_core.__version__]
    check = Importable("queues", ("json",), "xdit", "import queue, random").check()
    assert check.ok, check.detail


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
"""Environment in which standard output has the encoding ASCII."""


def start(*arguments: object, closed: tuple[int, ...] = (), **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Runs a command that begins with streams closed, as by `>&-`, or with other variables."""
    environment = {k: v for k, v in child_environment().items() if k not in ("PYTHONIOENCODING", "PYTHONUTF8")}
    return subprocess.run(
        [sys.executable, "-m", "dbsp_cli", *map(str, arguments)],
        env=environment | variables,
        preexec_fn=lambda: [*map(os.close, closed)],
        timeout=120,
        check=False,
        capture_output=True,
    )


def test_standard_streams_take_all_text_and_may_be_closed(tmp_path):
    """A closed stream's number is not given to a file that is opened later."""
    mask_file = tmp_path / "m.safetensors"
    save_mask(mask_file, BlockMask.dense(2, GRID))
    done = start("masks", "info", mask_file, "--gpus", 2, **ASCII)
    assert (done.returncode, done.stderr) == (0, b"")
    assert "?_s" in done.stdout.decode("ascii"), "ρ_s"
    done = start("masks", "info", mask_file, "--gpus", "2", closed=(0, 1))
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


def test_torchrun_ends_with_the_error_of_a_rank(mistake, monkeypatch, tmp_path):
    """Reads the error as torchrun does, which names a file for it to every rank."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    line = mistake("bench", "wan2.1-t2v-14c").rstrip("\n")
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(tmp_path / "error.json"))
    report = ChildFailedError("dbsp_cli", {0: failure}).format_msg()
    assert report.rstrip("=\n").endswith(line)


ESCAPES = "\x1b]0;title\x07\x1b[31m"


def test_nothing_in_a_file_reaches_the_terminal_as_it_is(dbsp, tmp_path):
    """Checks names of files too, as an archive may bring them."""
    folder = tmp_path / f"r{ESCAPES[1:]}\x1b"
    folder.mkdir()
    save_mask(folder / "0.safetensors", [BlockMask.dense(2, GRID)])
    passes = [{"generation": 0, "step": 0, "cfg_branch": 0, "masks": {"0": "0"}}]
    index = {"layers": 1, "passes": passes, "stopped": ESCAPES}
    (folder / "index.json").write_text(json.dumps(index), encoding="utf-8")
    for arguments in (
        ("masks", "info", folder, "--gpus", 2),
        ("masks", "info", folder / "0.safetensors", "--gpus", 2),
        ("masks", "info", folder / "gone", "--gpus", 2),
        ("report", folder / "index.json"),
    ):
        _, out, err = dbsp(*arguments)
        assert "\x1b" not in out + err, arguments
        assert "\\x1b" in out + err, arguments
    table = as_text(TextTable(ESCAPES, ("what", ESCAPES), [(ESCAPES, "ρ_s")], ESCAPES), 40)
    assert "\x1b" not in table
    assert "\x07" not in table
    assert table.count("\\x1b]0;title") == 4
