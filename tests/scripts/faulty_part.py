"""A part of the GPU suite whose cases fail in every way."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

from scripts.checks.gpu.results import Case, Row, Skipped
from scripts.checks.gpu.setting import Setting


def cases(setting: Setting) -> Iterator[Case]:
    yield Case("right", lambda: [Row("error", 0.5, limit=1.0), Row("a rate", 3.0, "TFLOP/s", goal="≥ 4")])
    yield Case("raises", raises)
    yield Case("dies", dies)
    yield Case("hangs", hangs, limit_s=1)
    yield Case("breaks the device", breaks_the_device)
    yield Case("wrong", lambda: [Row("error", 2.0, limit=1.0)])
    yield Case("not a number", lambda: [Row("error", float("nan"), limit=1.0)])
    yield Case("not here", not_here)
    yield Case("right again", lambda: [Row("error", 0.0, limit=1.0)])


def raises() -> Iterator[Row]:
    yield Row("found before", 1.0)
    raise RuntimeError("a kernel failed")


def dies() -> Iterator[Row]:
    yield Row("found before", 1.0)
    os.abort()


def hangs() -> Iterator[Row]:
    yield Row("found before", 1.0)
    threading.Event().wait()


def breaks_the_device() -> Iterator[Row]:
    Setting.device_works = lambda self: False  # type: ignore[method-assign]
    yield Row("found before", 1.0)


def not_here() -> Iterator[Row]:
    raise Skipped("one GPU")
    yield
