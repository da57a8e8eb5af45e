"""Starting ranks with torchrun and following them: their output goes to a log, progress and errors to the user."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path

from dbsp_cli.generate.joined import Joined
from dbsp_cli.generate.log_file import new_log, reword_log
from dbsp_cli.generate.meeting import Meeting
from dbsp_cli.generate.orphans import RUN, kill_orphans, signal_of_run
from dbsp_core.comm.groups import BROKE_OFF
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.log import ERROR, NOTICE
from dbsp_start.held import held

__all__ = ["STARTING", "Launch", "LogFollower", "RunFailed", "run_watched"]

_TAG = re.compile(r"\(rank (\d+)\) ")
_STEPS_DONE = re.compile(r"(\d+)/(\d+) \[")
_FAILURE = re.compile(r"rank\s+: (\d+) \(local_rank.*?exitcode\s+: (-?\d+)", re.DOTALL)
"""Of a rank, in torchrun's summary; the last one is what it takes for the root cause."""
_TELLS_TO_END = re.compile(r"Sending process (\d+) closing signal")
_TOLD_TO_END = re.compile(r"SignalException: Process \d+ got signal: (\d+)")
_TAIL = 30
_MOST = 4096
_PORT = 29500  # torchrun's
STARTING = "starting ranks"
_GRACE_S = 1.5  # for torchrun to end its ranks, which have nothing to save; then all of them are killed


@dataclass(frozen=True)
class Launch:
    """How torchrun starts ranks, or which of those that are there this process is.

    nproc:  processes on this node
    nnodes: nodes that join; the options are torchrun's, which must name a rendezvous where there are several
    joined: this process's place, where it is one of the ranks itself and torchrun starts none
    """

    nproc: int = 1
    nnodes: int = 1
    node_rank: int | None = None
    master_addr: str | None = None
    master_port: int | None = None
    rdzv_backend: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    joined: Joined | None = None

    def __post_init__(self) -> None:
        for name in ("nproc", "nnodes"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)} must be at least 1")
            if getattr(self, name) > _MOST:
                raise UserError(f"--{name} {getattr(self, name)} must be at most {_MOST:,}")
        if self.nnodes == 1:
            if self.node_rank:
                raise UserError(f"--node-rank {self.node_rank} needs as many nodes; add --nnodes")
        elif self.rdzv_endpoint is None and self.master_addr is None:
            raise UserError(
                f"--nnodes {self.nnodes} needs a place to meet, the same on all nodes: --rdzv-backend c10d "
                "--rdzv-endpoint HOST:PORT, or --master-addr HOST --master-port PORT with a --node-rank for each"
            )
        elif self.rdzv_endpoint is None and self.node_rank is None:
            raise UserError("--master-addr needs a --node-rank: 0 on that node, 1, 2 … on the others")
        if self.node_rank is not None and not 0 <= self.node_rank < self.nnodes:
            raise UserError(f"--node-rank {self.node_rank} must be below --nnodes {self.nnodes}")

    @property
    def world(self) -> int:
        return self.joined.world if self.joined else self.nproc * self.nnodes

    @property
    def nodes(self) -> int:
        return max(1, self.joined.world // self.joined.local_world) if self.joined else self.nnodes

    @property
    def leads(self) -> bool | None:
        """Whether rank 0 runs under this command; None: not known before."""
        if self.joined:
            return self.joined.rank == 0
        return True if self.nnodes == 1 else None if self.node_rank is None else self.node_rank == 0

    def meeting(self, seconds: float) -> Meeting | None:
        """Of several nodes. seconds: that one waits for the others"""
        if self.nnodes == 1:
            return None
        place = self.rdzv_endpoint or f"{self.master_addr}:{self.master_port or _PORT}"
        return Meeting(self.nnodes, place, seconds)

    def command(self, module: str, arguments: Sequence[str], meeting: Meeting | None = None) -> list[str]:
        """The command line that runs `python -m module arguments` in every rank, or in this one: by torchrun, with
        which they end, or by itself."""
        rank = ["-m", "dbsp_start.rank", module, *arguments]
        if self.joined:
            return [sys.executable, *rank]
        others = {key: value for key, value in vars(self).items() if key not in ("nproc", "joined")}
        options = {"nproc_per_node": self.nproc} | others
        if self.rdzv_endpoint is not None:
            options["rdzv_backend"] = self.rdzv_backend or "c10d"
        texts = [f"--{key.replace('_', '-')}={value}" for key, value in options.items() if value is not None]
        met = ["--standalone"] if self.nnodes == 1 else [meeting.option] if meeting else []
        return [sys.executable, "-m", "torch.distributed.run", *met, *texts, *rank]


class RunFailed(RuntimeError):
    """Ranks failed; the message ends with what the first one said last."""


@dataclass
class LogFollower:
    """What of the ranks' output is for the user.

    steps:       of the denoising; a progress bar with this total is the one to follow
    on_step:     called with the number of steps that are done
    on_notice:   called once with each line that begins with "dbsp: "
    on_stage:    called with what is being done now, in words
    rank:        whose the output is, where lines have no tag
    reword:      from what ranks say to words that mean something to the user
    last_lines:  of each rank's output, "" for torchrun's own;  user_errors: the first one of each rank
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
    _told: set[str] = field(default_factory=set)
    _stage: str = ""

    def line(self, line: str) -> None:
        """One line of torchrun's output, in which each rank's words come after its tag."""
        _, *tagged = _TAG.split(line)
        if not tagged:
            self._words(self.rank, line.strip())
        for rank, text in zip(tagged[::2], tagged[1::2], strict=True):
            self._words(rank, text.strip())

    def progress(self, text: str) -> None:
        """Output of rank 0, or untagged, that may end within a line."""
        done = [int(count) for count, total in _STEPS_DONE.findall(text) if int(total) == self.steps]
        if done:
            self.stage("decoding and writing the video" if done[-1] == self.steps else "denoising")
            self.on_step(done[-1])

    def stage(self, stage: str) -> None:
        """Says what is being done, once."""
        if stage != self._stage:
            self._stage = stage
            self.on_stage(stage)

    def _words(self, rank: str, text: str) -> None:
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
        elif text.startswith(NOTICE) and text not in self._told:
            self._told.add(text)
            self.on_notice(text)


def run_watched(
    command: Sequence[str],
    log: Path,
    ranks_folder: Path,
    follower: LogFollower,
    environment: Mapping[str, str] | None = None,
    meeting: Meeting | None = None,
) -> None:
    """Runs a command that starts ranks with torchrun. All output goes to `log`, nothing to the terminal.

    ranks_folder: for torchrun's own logs
    environment:  variables besides this process's
    meeting:      of its torchrun with those of other nodes
    Raises UserError when a rank found a user error, RunFailed when one failed otherwise. However this ends, also
    by an interrupt, or by torchrun's own end, no rank outlives it. On Linux none outlives this process either.
    """
    variables = {
        "TQDM_MININTERVAL": "0",
        **os.environ,
        **(environment or {}),
        "PYTHONUNBUFFERED": "1",
        "PET_TEE": "3",
        "PET_LOG_DIR": str(ranks_folder),
        RUN: str(ranks_folder),
        "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "(rank ${rank}) ",
    }
    with new_log(log) as file:
        process = subprocess.Popen(
            held(command), env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            follower.stage(STARTING)
            tell = lambda line: follower.on_notice(f"{NOTICE}{line}")  # noqa: E731
            with meeting.watched(ranks_folder, tell) if meeting else nullcontext():
                _follow(process, file.write, follower, str(ranks_folder))
            code = process.wait()
        finally:
            try:
                _end(process)
            finally:
                kill_orphans(str(ranks_folder))
                file.close()
                with suppress(OSError):  # such as of a full disk
                    reword_log(log, follower.reword)
    if code != 0:
        alone = meeting.complaint(ranks_folder, "\n".join(follower.last_lines[""])) if meeting else None
        raise RunFailed(f"{alone}; torchrun's output is in {log}") if alone else _failure(code, log, follower)


def _follow(
    process: subprocess.Popen[bytes], keep: Callable[[bytes], object], follower: LogFollower, run: str
) -> None:
    if process.stdout is None:
        raise RuntimeError("the ranks' output could not be read")
    begun = ""
    while chunk := process.stdout.read1(1 << 16):  # type: ignore[attr-defined]  # a BufferedReader has it
        keep(chunk)
        *lines, begun = re.split(r"[\r\n]+", begun + chunk.decode(errors="replace"))
        for line in lines:
            follower.line(line)
            for told in map(int, _TELLS_TO_END.findall(line)):
                _end_soon(told, run)
        if follower.rank == "0" or begun.startswith("(rank 0) "):  # a progress bar's line ends when it is drawn again
            follower.progress(begun)
    follower.line(begun)


def _end_soon(rank: int, run: str) -> None:
    """A process that torchrun has told to end: it would wait 30 s for one that stands still."""
    signal_of_run(rank, run, signal.SIGCONT)
    later = threading.Timer(_GRACE_S, signal_of_run, [rank, run, signal.SIGKILL])
    later.daemon = True
    later.start()


def _end(process: subprocess.Popen[bytes]) -> None:
    """torchrun ends its ranks, which have process groups of their own, when it is told to end."""
    if process.poll() is not None:
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.communicate(timeout=_GRACE_S)
    except BaseException as error:  # it takes too long, or the user won't wait
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise


def _root_cause(summary: str, last_lines: Mapping[str, Sequence[str]]) -> tuple[str, int] | None:
    """The rank whose failure is the others' cause, and its exit code; None where torchrun names none.

    torchrun takes the first that it sees. Where several have failed by the time it looks, that may be one whose last
    words are that another is gone.
    """
    failures = [(rank, int(code)) for rank, code in _FAILURE.findall(summary)]

    def is_consequence(failure: tuple[str, int]) -> bool:
        rank, code = failure
        return code == -signal.SIGTERM or any(BROKE_OFF in line for line in last_lines.get(rank, ()))

    return min(reversed(failures), key=is_consequence, default=None)


def _failure(code: int, log: Path, follower: LogFollower) -> Exception:
    if follower.user_errors:
        return UserError(next(iter(follower.user_errors.values())))
    own_words = "\n".join(follower.last_lines[""])
    cause, told = _root_cause(own_words, follower.last_lines), _TOLD_TO_END.search(own_words)
    if cause is None and not follower.rank and (code < 0 or told):
        by = signal.Signals(int(told[1]) if told else -code).name
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
