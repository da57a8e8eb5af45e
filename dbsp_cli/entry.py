"""The installed command.

Standard streams take all text, also if they are closed or not UTF-8. At the command's end, what it has imported is not
taken apart: with torch and frameworks that would take one to two seconds, in which others wait for the process, and in
which gloo's threads can abort it.
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
        long = sys.argv[1:2] == ["generate"] and "RANK" not in os.environ  # the command has said it for its ranks
        if passing or long:  # a log gets this line only for what takes long anyway
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
    """Opens closed standard streams on the null device, and has standard output replace what it cannot encode.

    Without that, files that are opened later would get the numbers of closed streams, and what is printed.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            stream = open(os.devnull, mode, encoding="utf-8")  # noqa: SIM115  takes the lowest number that is free
            os.set_inheritable(stream.fileno(), True)
            setattr(sys, name, stream)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")


@contextmanager
def fast_exit() -> Iterator[None]:
    """Wraps a whole program, before it imports much: its process ends right after its `atexit` functions.

    Its threads have been waited for by then, errors have been shown, and the exit code is what it would have been. An
    interrupt is left to the interpreter, as is output that cannot be written.
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
    except SystemExit as stopped:  # as the interpreter reads it: text is 1
        code = stopped.code & 0xFF if isinstance(stopped.code, int) else int(stopped.code is not None)
        raise
    except Exception:
        code = 1
        raise
