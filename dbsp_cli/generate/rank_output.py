"""What ranks say: all of it in a log file, progress and errors to the user, and why a run failed."""

from __future__ import annotations

import re
import signal
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from dbsp_core.comm.groups import BROKE_OFF
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.files import write_atomically
from dbsp_core.utils.process import ERROR, NOTICE

__all__ = ["STARTING", "LogFollower", "RunFailed", "failure_of", "new_log", "require_own_log", "reword_log"]

STARTING = "starting ranks"
_TAG = re.compile(r"\(rank (\d+)\) ")
_STEPS_DONE = re.compile(r"(\d+)/(\d+) \[")
_FAILURE = re.compile(r"rank\s+: (\d+) \(local_rank.*?exitcode\s+: (-?\d+)", re.DOTALL)
"""One rank's failure in torchrun's summary; the last one is what torchrun takes for the root cause."""
_TORCHRUN_SIGNALLED = re.compile(r"SignalException: Process \d+ got signal: (\d+)")
_TAIL = 30  # lines
_FIRST_LINE = b"dbsp: output of ranks\n"
"""First line of a log, by which another program's file of that name is known and kept."""


def require_own_log(log: Path) -> None:
    """Raises UserError where there is something that no run has written."""
    if log.is_dir():
        raise UserError(f"{log}, where the ranks' output is to go, is a folder; give another file with --out")
    if not log.is_file():
        return
    with log.open("rb") as file:
        if file.read(len(_FIRST_LINE)) not in (b"", _FIRST_LINE):
            raise UserError(
                f"{log}, where the ranks' output is to go, is not a log of db-SP's; move it away, or give another "
                "file with --out"
            )


def new_log(log: Path) -> BinaryIO:
    """Opens an empty log in place of the last run's."""
    log.parent.mkdir(parents=True, exist_ok=True)
    require_own_log(log)
    file = log.open("wb")
    file.write(_FIRST_LINE)
    return file


def reword_log(log: Path, reword: Callable[[str], str]) -> None:
    """Rewrites a log by a function of its whole text."""
    text = log.read_bytes().decode(errors="surrogateescape")
    reworded = reword(text)
    if reworded != text:
        write_atomically(log, reworded.encode(errors="surrogateescape"))


class RunFailed(RuntimeError):
    """Ranks failed; the message ends with the last lines of the first one that did."""


@dataclass
class LogFollower:
    """Takes from the ranks' output what is for the user.

    Attributes:
        steps: Number of denoising steps; a progress bar with this total is the one to follow.
        on_step: Called with the number of steps that are done.
        on_notice: Called once with each line that begins with "dbsp: ".
        on_stage: Called with what is being done now, in words.
        rank: Rank that lines without a tag belong to; "" for torchrun itself.
        reword: Replaces names that only the ranks know by the user's.
        last_lines: Last lines of each rank's output, "" for torchrun's own.
        user_errors: First user error of each rank.
    """

    steps: int
    on_step: Callable[[int], None] = lambda done: None
    on_notice: Callable[[str], None] = lambda line: None
    on_stage: Callable[[str], None] = lambda stage: None
    rank: str = ""
    reword: Callable[[str], str] = lambda text: text
    last_lines: dict[str, deque[str]] = field(
        default_factory=lambda: defaultdict(lambda: deque(maxlen=_TAIL), {"": deque(maxlen=8 * _TAIL)})
    )
    user_errors: dict[str, str] = field(default_factory=dict)
    _notices: set[str] = field(default_factory=set)
    _stage: str = ""

    def line(self, line: str) -> None:
        """Takes one line of torchrun's output, in which each rank's text follows its tag."""
        _, *tagged = _TAG.split(line)
        if not tagged:
            self._text(self.rank, line.strip())
        for rank, text in zip(tagged[::2], tagged[1::2], strict=True):
            self._text(rank, text.strip())

    def progress(self, text: str) -> None:
        """Takes output of rank 0, or untagged output, that may end within a line."""
        done = [int(count) for count, total in _STEPS_DONE.findall(text) if int(total) == self.steps]
        if done:
            self.stage("decoding and writing the video" if done[-1] == self.steps else "denoising")
            self.on_step(done[-1])

    def stage(self, stage: str) -> None:
        """Reports what is being done, once."""
        if stage != self._stage:
            self._stage = stage
            self.on_stage(stage)

    def _text(self, rank: str, text: str) -> None:
        if _STEPS_DONE.search(text):
            if rank in ("", "0"):
                self.progress(text)
            return
        if text and rank and self._stage == STARTING:
            self.stage("loading the model")
        text = self.reword(text)
        if text:
            self.last_lines[rank].append(text)
        if text.startswith(ERROR):
            self.user_errors.setdefault(rank, text.removeprefix(ERROR))
        elif text.startswith(NOTICE) and text not in self._notices:
            self._notices.add(text)
            self.on_notice(text)


def _root_cause(summary: str, last_lines: Mapping[str, Sequence[str]]) -> tuple[str, int] | None:
    """The rank whose failure made others fail, and its exit code; None where torchrun names none.

    torchrun takes the first failure that it sees. Where several ranks have failed by then, that may be a rank whose
    last words are that another is gone.
    """
    failures = [(rank, int(code)) for rank, code in _FAILURE.findall(summary)]

    def is_consequence(failure: tuple[str, int]) -> bool:
        rank, code = failure
        return code == -signal.SIGTERM or any(BROKE_OFF in line for line in last_lines.get(rank, ()))

    return min(reversed(failures), key=is_consequence, default=None)


def failure_of(code: int, log: Path, follower: LogFollower) -> Exception:
    """The error to raise for a run that ended with this exit code: UserError where a rank found one."""
    if follower.user_errors:
        return UserError(next(iter(follower.user_errors.values())))
    summary = "\n".join(follower.last_lines[""])
    cause, signalled = _root_cause(summary, follower.last_lines), _TORCHRUN_SIGNALLED.search(summary)
    if cause is None and not follower.rank and (code < 0 or signalled):
        by = signal.Signals(int(signalled[1]) if signalled else -code).name
        return RunFailed(
            f"torchrun, which runs the ranks, was ended from outside by {by}"
            + ("; the system does so when memory runs out" if by == "SIGKILL" else "")
            + f"; all ranks' output is in {log}"
        )
    rank, status = cause or (next((r for r in follower.last_lines if r), ""), code)
    killed = ": killed; out of memory? see dmesg" if status == -signal.SIGKILL else ""
    first = f"{f'rank {rank} ' if rank else ''}failed (exit code {status}{killed})"
    if not follower.last_lines[rank]:
        return RunFailed(f"{first} and said nothing; all output is in {log}")
    lines = [f"{first}; the end of its output:", *follower.last_lines[rank], f"all of it is in {log}"]
    return RunFailed("\n".join(lines))
