"""The commands as they are installed. An interrupt while the libraries are being imported ends them without a word."""

from __future__ import annotations

import os
import signal
from typing import NoReturn

__all__ = ["dbsp", "dbsp_xdit"]


def dbsp() -> None:
    before = _end_quietly_when_interrupted()
    from dbsp_cli.cli import main

    signal.signal(signal.SIGINT, before)
    main()


def dbsp_xdit() -> NoReturn:
    _end_quietly_when_interrupted()  # until it becomes torchrun, there is nothing to clean up
    from dbsp_xdit.run import main

    main()


def _end_quietly_when_interrupted() -> signal._HANDLER:
    """returns: what was done about interrupts before. Where they are ignored, they stay so."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
    return before
