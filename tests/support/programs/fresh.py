"""Makes a process that was forked from the server what an interpreter is at its start, but for imported modules."""

from __future__ import annotations

import atexit
import importlib.machinery
import io
import multiprocessing.process
import multiprocessing.util
import os
import random
import runpy
import signal
import sys
import tempfile
import types
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from tests.support.programs.command import Command

FOLDER = os.path.dirname(__file__)
_OWN = ("__main__", "tests", "scripts", "xfuser", "para_attn", "cache_dit")
"""Packages that no program finds imported."""
_KEPT: list[object] = []
"""What must not be taken apart: streams would write what the parent has begun."""


def run_program(command: Command, environment: dict[str, str]) -> None:
    """Becomes a fresh interpreter, in a process that has the program's folder and files, and runs the program."""
    _set_path(command, environment)
    os.environ.clear()
    os.environ.update(environment)
    _forget()
    _set_signals()
    _set_streams(command.unbuffered or bool(environment.get("PYTHONUNBUFFERED")))
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    threads = environment.get("OMP_NUM_THREADS", "")
    if threads.isdecimal() and int(threads) != torch.get_num_threads():
        torch.set_num_threads(int(threads))
    sys.orig_argv[:] = command.line
    sys.argv = [command.mode or command.program, *command.arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main).update(__builtins__=sys.modules["builtins"], __annotations__={})
    if environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":  # as the import of torch does
        torch._import_device_backends()
    if command.mode == "-m":
        runpy._run_module_as_main(command.program)  # type: ignore[attr-defined]
    elif command.mode == "-c":
        main.__loader__ = importlib.machinery.BuiltinImporter
        exec(compile(command.program, "<string>", "exec"), vars(main))
    else:
        path = os.path.abspath(command.program)
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", path)
        vars(main).update(__file__=path, __cached__=None)
        with open(path, "rb") as file:
            source = file.read()
        exec(compile(source, path, "exec"), vars(main))


def _folders(environment: dict[str, str]) -> list[str]:
    return [os.path.abspath(one) for one in environment.get("PYTHONPATH", "").split(os.pathsep) if one]


def _set_path(command: Command, environment: dict[str, str]) -> None:
    """Replaces PYTHONPATH's folders and the server's own by the program's."""
    first = {"-m": os.getcwd(), "-c": ""}.get(command.mode)
    if first is None:
        first = os.path.dirname(os.path.realpath(command.program))
    before = _folders(dict(os.environ))
    rest = [folder for folder in sys.path[1:] if os.path.abspath(folder) not in before]
    sys.path[:] = [first, *dict.fromkeys([*_folders(environment), *rest])]


def _forget() -> None:
    """Undoes what the server has done since its start."""
    _KEPT.extend(sys.modules.values())
    for name in [name for name in sys.modules if name.split(".")[0] in _OWN]:
        del sys.modules[name]
    sys.path_importer_cache.clear()
    importlib.invalidate_caches()
    atexit._clear()
    multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
    multiprocessing.process._children = set()  # type: ignore[attr-defined]
    tempfile.tempdir = None
    random.seed()
    np.random.seed()
    torch.default_generator.seed()


def _set_signals() -> None:
    """Handlers as after `exec`: those that are ignored stay so."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) not in (signal.SIG_IGN, signal.SIG_DFL, None):
            signal.signal(number, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_IGN)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _set_streams(unbuffered: bool) -> None:
    _KEPT.extend((sys.stdin, sys.stdout, sys.stderr, sys.__stdin__, sys.__stdout__, sys.__stderr__))
    sys.stdin = sys.__stdin__ = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _writer(1, "<stdout>", unbuffered)
    sys.stderr = sys.__stderr__ = _writer(2, "<stderr>", unbuffered, errors="backslashreplace", line_buffering=True)


def _writer(number: int, name: str, unbuffered: bool, **options: Any) -> io.TextIOWrapper:
    raw = io.FileIO(number, "w", closefd=False)
    raw.name = name
    buffer: Any = raw if unbuffered else io.BufferedWriter(raw)
    given = {"encoding": "utf-8", "write_through": unbuffered, "line_buffering": raw.isatty(), **options}
    return io.TextIOWrapper(buffer, **given)


def open_files() -> list[int]:
    """Numbers of this process's open files."""
    folder = "/proc/self/fd"  # the file that it is listed with is closed again
    return [int(number) for number in os.listdir(folder) if os.path.lexists(f"{folder}/{number}")]


def take_streams(streams: Iterable[int], kept: Iterable[int]) -> None:
    """Makes open files the standard streams, and closes all others but those that are kept."""
    for target, number in enumerate(streams):  # which are above 2
        os.dup2(number, target)
    last, kept = 2, sorted(one for one in kept if one > 2)
    for number in [*kept, os.sysconf("SC_OPEN_MAX")]:
        os.closerange(last + 1, number)
        last = number
