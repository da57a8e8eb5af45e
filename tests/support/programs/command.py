"""Command lines that run Python, as the interpreter understands them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_READ_AT_IMPORT = (
    *("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "DIFFUSERS_", "TRITON_", "TORCHDYNAMO_", "TORCH_COMPILE", "TORCH_LOGS"),
    *("PYTHON", "LD_", "LC_", "LANG", "MPL"),
)
_SET_ANEW = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "TRITON_CACHE_DIR")


@dataclass(frozen=True)
class Command:
    """A program in Python.

    Attributes:
        mode: "-m", "-c", or "" for a file.
        program: Module, source text, or file.
        line: The whole command line, as in `sys.orig_argv`.
    """

    mode: str
    program: str
    arguments: list[str]
    line: list[str]
    unbuffered: bool = False

    @classmethod
    def from_line(cls, line: Sequence[str | bytes | os.PathLike]) -> Command | None:
        """Returns the command of a line that runs this interpreter, with no option but -u; None for any other."""
        words = [os.fsdecode(word) for word in line]
        executable = words[0]
        if executable != sys.executable:
            if not _is_script(executable):
                return None
            words = [sys.executable, executable, *words[1:]]
        rest = words[1:]
        unbuffered = rest[:1] == ["-u"]
        rest = rest[unbuffered:]
        if len(rest) > 1 and rest[0] in ("-m", "-c"):
            return cls(rest[0], rest[1], rest[2:], words, unbuffered)
        if rest and not rest[0].startswith("-") and rest[0].endswith((".py", *_NO_SUFFIX)) and os.path.isfile(rest[0]):
            return cls("", rest[0], rest[1:], words, unbuffered)
        return None


_NO_SUFFIX = ("/dbsp", "/xdit", "/torchrun")


def _is_script(path: str) -> bool:
    """Returns whether a file is one of this environment's commands."""
    if not path.endswith(_NO_SUFFIX):
        return False
    with Path(path).open("rb") as file:
        return file.readline().rstrip() == f"#!{sys.executable}".encode()


def read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that the interpreter or libraries read when they begin, which a fork cannot change."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_READ_AT_IMPORT) and name not in _SET_ANEW
    }
