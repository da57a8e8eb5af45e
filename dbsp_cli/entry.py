"""Entry point of the installed command.

Standard streams accept any text, even if they are closed or not UTF-8. At the end the process exits without tearing
down imported modules, which would take one to two seconds, and in which gloo's threads can abort it.
"""

from __future__ import annotations

import atexit
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress


def dbsp() -> None:
    _open_streams()
    with fast_exit():
        passing = sys.stderr.isatty()
        long = sys.argv[1:2] == ["generate"] and "RANK" not in os.environ  # ranks: the parent has printed it
        if passing or long:  # in log files only for long commands
            print("dbsp: loading libraries", end="" if passing else "\n", file=sys.stderr, flush=True)
        try:
            from dbsp_cli.cli import main
        except KeyboardInterrupt:
            print("\n" * passing + "dbsp: interrupted", file=sys.stderr)
            raise SystemExit(130) from None
        if passing:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
        main()


def _open_streams() -> None:
    """Opens closed standard streams on the null device, and makes standard output replace unencodable characters.

    Otherwise files opened later would get the file descriptors of closed streams, and printed text.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115  takes the lowest free descriptor
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


@contextmanager
def fast_exit() -> Iterator[None]:
    """Wraps a whole program so that its process ends right after the `atexit` functions; call it before imports.

    Threads are joined, errors are shown and the exit code is unchanged. Interrupts and unwritable output are left to
    the interpreter.
    """
    code: int | None = None

    def end() -> None:
        if code is not None:
            with suppress(OSError, ValueError):
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)

    atexit.register(end)  # registered first, so called last
    try:
        yield
        code = 0
    except SystemExit as stopped:  # like the interpreter: text means 1
        code = stopped.code & 0xFF if isinstance(stopped.code, int) else int(stopped.code is not None)
        raise
    except Exception:
        code = 1
        raise
