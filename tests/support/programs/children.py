"""Programs that a forked program starts itself: by a fork without `exec`, from that very process."""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Sequence
from typing import Any

from tests.support.programs.command import Command
from tests.support.programs.ending import run_to_its_end
from tests.support.programs.fresh import FOLDER, Beginning, close_files, open_files, run_program, set_streams

_PARAMETERS = 23  # of subprocess._fork_exec, from Python 3.11 on


def fork_children(beginning: Beginning) -> None:
    """Makes `subprocess` fork from now on where a program is known."""
    real_start = subprocess._fork_exec  # type: ignore[attr-defined]

    def start(*given: Any) -> int:
        todo = _Start.from_request(given, beginning)
        return int(real_start(*given)) if todo is None else todo.fork(beginning)

    subprocess._fork_exec = start  # type: ignore[attr-defined]


class _Start:
    """The arguments of `subprocess._fork_exec`, where a fork can do it."""

    def __init__(self, command: Command, environment: dict[str, str], given: Sequence[Any]) -> None:
        self.command, self.environment = command, environment
        self.close_fds, self.kept, self.cwd = given[2:5]
        self.streams = (given[6], given[9], given[11])
        self.error_pipe = given[13]
        self.new_session, self.group = given[15:17]

    @classmethod
    def from_request(cls, given: Sequence[Any], beginning: Beginning) -> _Start | None:
        if len(given) != _PARAMETERS:
            return None
        arguments, executables, _, _, cwd, variables = given[:6]
        *identities, umask, preexec = given[17:22]
        if preexec is not None or umask >= 0 or any(one is not None for one in identities):
            return None
        if cwd is not None and not os.path.isdir(cwd):
            return None
        if variables is None:
            environment = dict(os.environ)
        else:
            pairs = (os.fsdecode(one).split("=", 1) for one in variables)
            environment = dict(pairs)
        command = Command.from_line(arguments, executables)
        if command is None or not beginning.can_be(environment):
            return None
        return cls(command, environment, given)

    def fork(self, beginning: Beginning) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, none of which this one's child needs
            process = os.fork()
        if process:
            return process
        run_to_its_end(lambda: self._begin(beginning), FOLDER)

    def _begin(self, beginning: Beginning) -> None:
        set_streams(self.streams)
        kept = {number for number in self.kept if number != self.error_pipe}
        for number in kept:
            os.set_inheritable(number, True)
        close_files([0, 1, 2, *beginning.files, *(kept if self.close_fds else _inheritable())])
        if self.cwd is not None:
            os.chdir(self.cwd)
        if self.new_session:
            os.setsid()
        if self.group >= 0:
            os.setpgid(0, self.group)
        run_program(beginning, self.command, self.environment)


def _inheritable() -> list[int]:
    return [number for number in open_files() if os.get_inheritable(number)]
