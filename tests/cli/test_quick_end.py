"""A process that ends quickly ends as it would have: exit code, output, threads, `atexit`. Nothing is taken apart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

HELD = """
import atexit, sys, threading, time

class Held:
    def __del__(self):
        print("taken apart", flush=True)

held = Held()
"""
QUICKLY = "from dbsp_cli.entry import fast_exit\n" + HELD + "with fast_exit():\n    "


def run(script: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
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
    quick, usual = run(QUICKLY + ends), run(HELD + ends)
    assert (quick.returncode, usual.returncode) == (code, code)
    assert quick.stderr.endswith(said)
    assert quick.stderr.splitlines()[-1:] == usual.stderr.splitlines()[-1:]
    assert (quick.stdout, usual.stdout) == ("", "taken apart\n")


def test_threads_are_waited_for_atexit_functions_called_and_output_is_written():
    done = run(
        QUICKLY
        + "atexit.register(print, 'second', end='')\n    "
        + "threading.Thread(target=lambda: (time.sleep(0.2), print('first'))).start()\n    "
        + "raise SystemExit(4)"
    )
    assert (done.returncode, done.stdout) == (4, "first\nsecond")


def test_an_interrupt_is_the_interpreters():
    done = run(QUICKLY + "raise KeyboardInterrupt")
    assert (done.returncode, done.stdout) == (-signal.SIGINT, "taken apart\n")


def test_output_that_nobody_takes_is_the_interpreters():
    reader, writer = os.pipe()
    os.close(reader)
    done = run(QUICKLY + "print('x')", writer)
    os.close(writer)
    assert done.returncode == 120
    assert "BrokenPipeError" in done.stderr
