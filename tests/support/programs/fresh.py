"""Makes a forked process what an interpreter is at its start, but for the modules that have been imported.

Not undone are changes inside the objects that imported modules hold, such as an attribute of a class, and modules of
the same packages that were imported later: torch's own operators can be registered only once.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.machinery
import io
import linecache
import logging
import multiprocessing.process
import multiprocessing.util
import os
import random
import runpy
import signal
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.support.programs.command import Command, read_at_import

FOLDER = os.path.dirname(__file__)
_KEPT: list[object] = []
"""What must not be taken apart: streams would write what the parent has begun, stores wait for its threads."""


@dataclass(frozen=True)
class Beginning:
    """The state that every program begins with.

    Attributes:
        path: Of modules, without PYTHONPATH's folders and the program's own.
        namespaces: Names of each module, for those that are not Python's own.
        packages: Those whose modules stay imported.
        files: Numbers of the files that imported modules have open.
        at_import: See `read_at_import`.
    """

    path: list[str]
    modules: dict[str, types.ModuleType]
    namespaces: dict[str, dict[str, Any]]
    packages: frozenset[str]
    meta_path: list[Any]
    path_hooks: list[Any]
    filters: list[Any]
    handlers: list[logging.Handler]
    level: int
    files: frozenset[int]
    at_import: dict[str, str]

    @classmethod
    def now(cls, own: Iterable[str], files: Iterable[int]) -> Beginning:
        """Keeps this process's state. own: packages that no program finds imported;  files: those that none has"""
        own = tuple(own)
        given = {os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder}
        modules = {name: one for name, one in sys.modules.items() if name.split(".")[0] not in (*own, "__main__")}
        packages = frozenset(name.split(".")[0] for name in modules)
        return cls(
            path=[folder for folder in sys.path[1:] if os.path.abspath(folder) not in given],
            modules=modules,
            namespaces={
                name: dict(vars(one))
                for name, one in modules.items()
                if name.split(".")[0] not in sys.stdlib_module_names
            },
            packages=packages,
            meta_path=list(sys.meta_path),
            path_hooks=list(sys.path_hooks),
            filters=list(warnings.filters),
            handlers=list(logging.root.handlers),
            level=logging.root.level,
            files=frozenset(open_files()) - set(files),
            at_import=read_at_import(os.environ),
        )

    def can_be(self, environment: dict[str, str]) -> bool:
        """Returns whether a program in this environment would have begun so."""
        return read_at_import(environment) == self.at_import

    def again(self) -> None:
        """Makes this process so, for any program before it has done."""
        gc.freeze()
        _KEPT.extend(sys.modules.values())
        for name in list(sys.modules):
            if name not in self.modules and name.split(".")[0] not in self.packages:
                del sys.modules[name]
        sys.modules.update(self.modules)
        for name, namespace in self.namespaces.items():
            names = vars(self.modules[name])
            if names.keys() != namespace.keys() or any(names[one] is not namespace[one] for one in namespace):
                imported = {one: value for one, value in names.items() if _is_module(value, f"{name}.{one}")}
                names.clear()
                names.update(imported | namespace)
        sys.meta_path[:], sys.path_hooks[:] = self.meta_path, self.path_hooks
        sys.path_importer_cache.clear()
        importlib.invalidate_caches()
        linecache.clearcache()
        warnings.filters[:] = self.filters
        warnings._filters_mutated()  # type: ignore[attr-defined]
        logging.root.handlers[:] = self.handlers
        logging.root.setLevel(self.level)
        sys.excepthook, sys.displayhook = sys.__excepthook__, sys.__displayhook__
        sys.unraisablehook, threading.excepthook = sys.__unraisablehook__, threading.__excepthook__
        atexit._clear()
        multiprocessing.util._finalizer_registry.clear()  # type: ignore[attr-defined]
        multiprocessing.process._children = set()  # type: ignore[attr-defined]
        tempfile.tempdir = None
        random.seed()
        np.random.seed()
        torch.default_generator.seed()


def _is_module(value: object, name: str) -> bool:
    return isinstance(value, types.ModuleType) and sys.modules.get(name) is value


def run_program(beginning: Beginning, command: Command, environment: dict[str, str]) -> None:
    """Becomes a fresh interpreter, in a process that has the program's folder and files, and runs the program."""
    beginning.again()
    os.environ.clear()
    os.environ.update(environment)
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
    _set_path(beginning, command, environment)
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


def _set_path(beginning: Beginning, command: Command, environment: dict[str, str]) -> None:
    first = {"-m": os.getcwd(), "-c": ""}.get(command.mode)
    if first is None:
        first = os.path.dirname(os.path.realpath(command.program))
    given = environment.get("PYTHONPATH", "")
    folders = [os.path.abspath(folder) for folder in given.split(os.pathsep)] if given else []
    sys.path[:] = [first, *dict.fromkeys([*folders, *beginning.path])]


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
    folder = "/proc/self/fd" if os.path.isdir("/proc/self/fd") else "/dev/fd"
    return [number for number in map(int, os.listdir(folder)) if _is_open(number)]


def _is_open(number: int) -> bool:
    """Returns False for the file that the others were listed with, which is closed by now."""
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def close_files(kept: Iterable[int]) -> None:
    """Closes all files but these."""
    for number in set(open_files()) - set(kept):
        os.close(number)


def set_streams(streams: Iterable[int]) -> None:
    """Makes files the standard streams 0, 1, 2; -1 leaves one as it is."""
    apart = [number if number < 0 else _dup_above(number) for number in streams]
    for target, number in enumerate(apart):
        if number >= 0:
            os.dup2(number, target)


def _dup_above(number: int) -> int:
    import fcntl

    return fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, 3)
