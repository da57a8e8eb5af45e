"""Programs that are forked behave as those that an interpreter starts: `tests/support/programs`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.support.programs import Program, run
from tests.support.programs.program import end_with_descendants
from tests.support.repository import python_path


def both(*arguments: str, **options) -> list[subprocess.CompletedProcess]:
    """Returns what a program did when it was forked, and when an interpreter started it."""
    line = [sys.executable, *arguments]
    real = subprocess.run(line, capture_output=True, text=True, **options)
    return [run(line, **options), real]


SEEN = """
import os, signal, sys
print(sys.argv, sys.orig_argv, sys.path, os.getcwd(), dict(sorted(os.environ.items())), sep="\\n")
print([(str(one), signal.getsignal(one)) for one in sorted(signal.valid_signals() - {9, 19})])
print(__name__, sorted(name for name in vars() if name != "__annotations__"), sys.stdin.read(), os.umask(0))
print(sys.stdout.encoding, sys.stdout.line_buffering, sys.stderr.errors, sys.flags, sys.excepthook)
print(sys.stdout.write_through, sys.stderr.write_through, sorted(os.listdir("/proc/self/fd")))
"""


@pytest.mark.parametrize("how", ["-c", "file", "unbuffered"])
def test_what_a_program_sees_is_what_it_would_from_an_interpreter(tmp_path, how):
    (tmp_path / "seen.py").write_text(SEEN)
    program = {
        "-c": ["-c", SEEN],
        "file": [str(tmp_path / "seen.py")],
        "unbuffered": ["-u", "-m", "seen"],
    }[how]
    environment = os.environ | {"PYTHONPATH": python_path(tmp_path), "MINE": "1"}
    (tmp_path / "there").mkdir()
    forked, real = both(*program, "a", "-b", env=environment, cwd=tmp_path / "there", stdin=subprocess.DEVNULL)
    assert forked.stdout.splitlines() == real.stdout.splitlines()
    assert (forked.returncode, forked.stderr) == (real.returncode, real.stderr) == (0, "")


@pytest.mark.parametrize(
    "ends",
    [
        "sys.exit(-1)",
        "sys.exit('no video')",
        "[][1]",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "raise KeyboardInterrupt",
        "no syntax",
        "threading.Thread(target=lambda: (time.sleep(0.2), print('thread'))).start()",
    ],
)
def test_it_ends_as_from_an_interpreter(tmp_path, ends):
    script = tmp_path / "ends.py"
    script.write_text(f"import atexit, os, signal, sys, threading, time\natexit.register(print, 'at exit')\n{ends}\n")
    forked, real = both(str(script))
    assert (forked.returncode, forked.stdout, forked.stderr) == (real.returncode, real.stdout, real.stderr)


def test_program_ends_on_a_signal_and_is_ended_with_its_children():
    line = [sys.executable, "-c", "import time; print(1, flush=True); time.sleep(600)"]
    with Program(line, stdout=subprocess.PIPE) as program:
        assert program.stdout.readline() == b"1\n"
        program.terminate()
        assert program.wait(60) == -signal.SIGTERM
    starts = [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])", *line]
    with Program(starts, stdout=subprocess.PIPE) as program:
        assert program.stdout.readline() == b"1\n"
        end_with_descendants(program.pid)
        assert (program.wait(60), program.stdout.read()) == (-signal.SIGKILL, b""), "the child has closed it too"


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (["-I", "-c", "pass"], {}),
        (["-c", "pass"], {"env": os.environ | {"PYTHONWARNINGS": "error"}}),
    ],
)
def test_what_is_not_known_starts_really(arguments, options):
    with Program([sys.executable, *arguments], stderr=subprocess.DEVNULL, **options) as program:
        assert not program.forked
        program.wait(60)
