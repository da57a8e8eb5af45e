"""No process outlives what started it: torchrun and ranks when a terminal is closed, or when anything is killed."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest

from dbsp_cli.generate.launch import Launch
from dbsp_cli.generate.rank_output import LogFollower, RunFailed
from dbsp_cli.generate.supervisor import end_cleanly_on_signals, run_watched
from tests.cli.generate.cheap_ranks import LIMIT_S, Ranks, generating, runs, wait_until
from tests.cli.generate.tiny_mp4 import tiny_mp4
from tests.support.repository import child_environment

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes as Linux shows them")


@pytest.fixture
def folder(tmp_path):
    """Where the video is to be, beside the folder of the ranks' signs."""
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_closed_terminal_ends_everything_in_order_and_a_second_run_is_refused_before(folder, dbsp):
    terminal, end = os.openpty()
    options = {
        "stdin": end,
        "stdout": end,
        "stderr": end,
        "start_new_session": True,
        "preexec_fn": lambda: (fcntl.ioctl(0, termios.TIOCSCTTY, 0), signal.signal(signal.SIGHUP, signal.SIG_DFL)),
    }
    with generating(folder, **options) as (run, ranks):
        os.close(end)
        assert len(ranks.left()) == 3
        log = (folder / "ball.log").read_bytes()
        code, out, err = dbsp("generate", "--config", "tiny-wan", "--prompt", "x", "--out", folder / "ball.mp4")
        assert (code, out) == (2, "")
        assert f"another run is making {folder / 'ball.mp4'} (process {run.pid} on " in err
        assert (folder / "ball.log").read_bytes() == log
        os.close(terminal)
        assert run.wait(LIMIT_S) == 128 + signal.SIGHUP
        assert ranks.left() == []
    assert names(folder) == ["ball.log"]


@pytest.mark.parametrize(("before", "ends"), [(signal.SIG_IGN, False), (signal.SIG_DFL, True)])
def test_what_nohup_had_ignored_stays_ignored(before, ends):
    kept = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    try:
        signal.signal(signal.SIGHUP, before)
        end_cleanly_on_signals()
        if ends:
            with pytest.raises(SystemExit) as ended:
                signal.raise_signal(signal.SIGHUP)
            assert ended.value.code == 128 + signal.SIGHUP
        signal.raise_signal(signal.SIGHUP)  # nothing, then: it is ending already
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def test_a_killed_command_takes_torchrun_and_ranks_along_and_the_next_one_cleans_up(folder, dbsp, monkeypatch):
    with generating(folder) as (run, ranks):
        run.kill()
        wait_until(lambda: not ranks.left())
    assert len([name for name in names(folder) if name.startswith(".ball.dbsp-")]) == 1

    def finished(command: list[str], log: Path, ranks_folder: Path, watcher: LogFollower, *_: object) -> None:
        (ranks_folder.parent / "video.mp4").write_bytes(tiny_mp4())

    monkeypatch.setattr("dbsp_cli.generate.running.run_watched", finished)
    monkeypatch.setattr("dbsp_cli.generate.running.make_tiny", lambda *_: None)
    code, _, err = dbsp("generate", "--config", "tiny-wan", "--prompt", "x", "--out", folder / "ball.mp4")
    assert code == 0, err
    assert names(folder) == ["ball.log", "ball.mp4"]


def run_two_of(rank: Path, folder: Path) -> None:
    """`dbsp generate`'s torchrun with two ranks of the program `rank` instead of its own."""
    command = Launch(2).command("any", [])
    command[command.index("dbsp_start.rank") - 1 :] = [str(rank)]
    run_watched(command, folder / "log", folder / "ranks", LogFollower(1))


def test_a_rank_that_stands_still_is_not_waited_for_once_another_has_failed(tmp_path):
    """torchrun alone would wait for half a minute, and say then that it could not end it."""
    rank = tmp_path / "rank.py"
    rank.write_text(
        "import os, signal, time\n"
        f"sign = {str(tmp_path / 'stands')!r}\n"
        "if os.environ['RANK'] == '1':\n"
        "    open(sign, 'w').close()\n"
        "    os.kill(os.getpid(), signal.SIGSTOP)\n"
        "while not os.path.exists(sign):\n    time.sleep(0.05)\n"
        "raise IndexError('of rank 0')\n"
    )
    with pytest.raises(RunFailed, match=r"(?s)rank 0 failed .*IndexError: of rank 0"):
        run_two_of(rank, tmp_path)
    log = (tmp_path / "log").read_text()
    assert "closing signal SIGTERM" in log
    assert "Unable to shutdown process" not in log


LAST_WORDS = (
    r"^rank 1 failed \(exit code -9: killed; out of memory\? see dmesg\) and said nothing; all output is in .*log$"
)


def test_a_rank_that_was_killed_before_it_said_anything_is_the_one_that_is_blamed(tmp_path):
    rank = tmp_path / "rank.py"
    rank.write_text(
        "import os, signal, time\n"
        f"sign = {str(tmp_path / 'said')!r}\n"
        "if os.environ['RANK'] == '0':\n"
        "    print('all is well')\n"
        "    open(sign, 'w').close()\n"
        "    time.sleep(600)\n"
        "while not os.path.exists(sign):\n    time.sleep(0.05)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with pytest.raises(RunFailed, match=LAST_WORDS):
        run_two_of(rank, tmp_path)


def test_a_killed_torchrun_takes_along_ranks_that_know_nothing_of_db_sp_and_no_rank_is_blamed(tmp_path, monkeypatch):
    rank = tmp_path / "rank.py"
    rank.write_text("from tests.cli.generate import cheap_ranks\ncheap_ranks._be_a_rank(None)")
    monkeypatch.setenv("CHEAP_RANKS", str(tmp_path))
    found: list[Ranks] = []

    def kill() -> None:
        found.append(Ranks.ready(tmp_path, 2, lambda: True))
        os.kill(found[0].torchrun, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RunFailed, match="torchrun, which runs the ranks, was ended from outside by SIGKILL"):
        run_two_of(rank, tmp_path)
    killer.join()
    assert found[0].left() == []


def test_a_torchrun_that_was_told_to_end_is_said_to_be_and_no_rank_is_blamed(tmp_path):
    told = (
        "import sys, signal; print('(rank 0) at work'); print('…SignalException: Process 7 got signal: 15'); exit(1)"
    )
    with pytest.raises(RunFailed, match="torchrun, which runs the ranks, was ended from outside by SIGTERM; all"):
        run_watched([sys.executable, "-c", told], tmp_path / "log", tmp_path / "ranks", LogFollower(1))


SLEEPER = "import os\nprint(os.getpid(), flush=True)\nimport time\ntime.sleep(600)\n"
BY_THE_KERNEL = ["-m", "dbsp_start.rank", "sleeper"]
BY_LOOKING = [
    "-c",
    "from dbsp_start import parents\nparents._ask_the_kernel = lambda by: False\nparents._LOOK_S = 0.05\n"
    f"parents.end_with_parent()\n{SLEEPER}",
]


@pytest.mark.parametrize("how", [BY_THE_KERNEL, BY_LOOKING], ids=["told by the kernel", "looking for itself"])
def test_a_rank_ends_when_its_torchrun_is_killed(tmp_path, how):
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    starts = "import subprocess, sys, time\nsubprocess.Popen([sys.executable, *sys.argv[1:]])\ntime.sleep(600)"
    torchrun = subprocess.Popen(
        [sys.executable, "-c", starts, *how], stdout=subprocess.PIPE, text=True, env=child_environment(tmp_path)
    )
    assert torchrun.stdout is not None
    rank = int(torchrun.stdout.readline())
    torchrun.kill()
    ended = threading.Thread(target=torchrun.stdout.read)  # to its end, which comes when nobody has it any more
    ended.start()
    ended.join(LIMIT_S)
    if ended.is_alive():
        os.kill(rank, signal.SIGKILL)
        raise AssertionError("the rank lives on")
    torchrun.wait()


ANSWERS = (
    "import os\nfrom dbsp_start import parents\nparents._LOOK_S = 0.05\nparents.end_with_parent()\n"
    "print(os.getpid(), flush=True)\ninput()\nprint('lives on', flush=True)\nimport time\ntime.sleep(600)\n"
)
STARTED_BY_A_THREAD = """
import os, subprocess, sys, threading, time
def start():
    global run, thread
    thread = threading.get_native_id()
    pipe = subprocess.PIPE
    run = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdin=pipe, stdout=pipe, text=True)
    print(run.stdout.readline(), end='', flush=True)
threading.Thread(target=start).start()
while 'thread' not in globals() or os.path.exists(f'/proc/self/task/{thread}'):
    time.sleep(0.02)
run.stdin.write('\\n')
run.stdin.flush()
print(run.stdout.readline(), end='', flush=True)
print(run.stdout.read())
"""


def test_a_rank_outlives_the_thread_that_started_it_and_not_the_process():
    launcher = subprocess.Popen(
        [sys.executable, "-c", STARTED_BY_A_THREAD, ANSWERS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert launcher.stdout is not None
    rank = int(launcher.stdout.readline())
    try:
        assert launcher.stdout.readline() == "lives on\n"
        launcher.kill()
        launcher.wait()
        wait_until(lambda: not runs(rank))
    finally:
        if runs(rank):
            os.kill(rank, signal.SIGKILL)
        launcher.kill()
        launcher.communicate()


def test_a_rank_that_asks_too_late_ends_at_once(tmp_path):
    (tmp_path / "sleeper.py").write_text(SLEEPER)
    gone = subprocess.Popen(["true"])
    gone.wait()
    environment = child_environment(tmp_path) | {"DBSP_LAUNCHER": str(gone.pid)}
    done = subprocess.run([sys.executable, *BY_THE_KERNEL], env=environment, capture_output=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"")
