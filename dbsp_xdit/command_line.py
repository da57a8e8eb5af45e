"""Recognises xfuser's runs, and those with db-SP, by their command lines, before anything is imported."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise

__all__ = [
    "BACKEND",
    "FLAGS",
    "RUNNER",
    "dbsp_requested",
    "full_name",
    "is_xfuser_run",
    "is_xfusers_torchrun",
    "program",
]

RUNNER = "xfuser.runner"
BACKEND = "--sp_backend"
FLAGS = (BACKEND, "--sp_config")
"""db-SP's flags as xfuser's parser stores them: it turns dashes into underscores, and takes abbreviations."""


def is_xfuser_run(orig_argv: Sequence[str]) -> bool:
    """True for a command line `xdit …` or `python -m xfuser.runner …`; torchrun's own process is not one."""
    module, script = program(orig_argv)
    return module in (RUNNER, "xfuser.cli") or os.path.basename(script) in ("xdit", "xdit.exe")


def is_xfusers_torchrun(orig_argv: Sequence[str]) -> bool:
    """True for the command line `python -m torch.distributed.run … -m xfuser.runner …`, which `xdit` starts."""
    modules = [module for flag, module in pairwise(orig_argv) if flag == "-m"][:2]
    return modules == ["torch.distributed.run", RUNNER]


def program(orig_argv: Sequence[str]) -> tuple[str, str]:
    """Returns what Python runs by this command line: (module, ""), or ("", file); ("", "") for anything else."""
    arguments = iter(orig_argv[1:])
    for argument in arguments:
        if argument == "-" or not argument.startswith("-"):
            return "", argument
        if argument == "--check-hash-based-pycs":
            next(arguments, "")
        if argument.startswith("--"):
            continue
        # the first of these letters in a word takes the rest of the word as its value, or else the next word
        place = next((place for place, letter in enumerate(argument) if letter in "cmWX"), None)
        if place is not None:
            value = argument[place + 1 :] or next(arguments, "")
            if argument[place] in "cm":
                return (value, "") if argument[place] == "m" else ("", "")
    return "", ""


def dbsp_requested(argv: Sequence[str]) -> bool:
    """True where a command line names a backend other than "usp": "dbsp", or a misspelling to be refused."""
    words = [word for argument in argv for word in argument.split("=", 1)]
    backends = [value for name, value in pairwise(words) if full_name(name) == BACKEND]
    return bool(backends) and backends[-1] != "usp"


def full_name(argument: str) -> str:
    """Expands db-SP's flag, abbreviated or not; returns any other word as it is."""
    name = argument.replace("-", "_").replace("__", "--", 1)
    meant = [flag for flag in FLAGS if flag.startswith(name) and name.startswith("--sp_")]
    return meant[0] if len(meant) == 1 else argument
