"""Recognises, when torch is imported, a process of the `xdit` command that was given db-SP's flags, or `--help`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

AfterImport = Callable[[Mapping[str, Callable[[ModuleType], object]]], Callable[[], None]]
"""Runs functions once the modules of these names have been imported; returns a function that takes them back."""


def autoload(after_import: AfterImport) -> None:
    """Adds db-SP to this xfuser run if its command line asks for it. Never raises: torch must stay importable."""
    if not requested(sys.orig_argv, len(getattr(sys, "argv", ()))):
        return
    try:
        from dbsp_xdit.runner import install

        install(after_import)
    except Exception as error:  # by no logger: loading one may be what failed
        print(f"dbsp: not loaded into this xfuser run: {type(error).__name__}: {error}", file=sys.stderr)


def requested(command: Sequence[str], words: int) -> bool:
    """Returns True for `xdit …` or `python -m xfuser.runner …` with a flag of db-SP's, or `--help`, which shows them.

    Args:
        command: The whole command line.
        words: Number of its last words that are the program, a script or `-m`'s module, and the program's arguments.
    """
    program, *arguments = command[len(command) - words :] or [""]
    is_xfuser = program.endswith(("xfuser.runner", "xfuser.cli")) or os.path.basename(program) in ("xdit", "xdit.exe")
    flags = {word.partition("=")[0].replace("_", "-") for word in arguments}
    return is_xfuser and any(flag.startswith("--sp-") or flag in ("--help", "-h") for flag in flags)
