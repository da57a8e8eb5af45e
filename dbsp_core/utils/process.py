"""This process: log, environment variables, package versions, and exclusion from torch.compile."""

from __future__ import annotations

import functools
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import ParamSpec, TypeVar

import torch

from dbsp_core.utils.errors import UserError, fingerprint_of

NOTICE = "dbsp: "  # prefix of lines for the user
ERROR = NOTICE + "error: "  # prefix of the line that names a user's mistake


def printable(text: str) -> str:
    """Escapes control characters other than line breaks, such as "\\x1b"."""
    escaped = (c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode("ascii") for c in text)
    return "".join(escaped)


class _StandardError(logging.Handler):
    """Writes to the current `sys.stderr`."""

    def emit(self, record: logging.LogRecord) -> None:
        prefix = ERROR if record.levelno >= logging.ERROR else NOTICE
        sys.stderr.write(f"{prefix}{printable(self.format(record))}\n")
        sys.stderr.flush()


log = logging.getLogger("dbsp")
if not log.handlers:
    log.addHandler(_StandardError())
    log.setLevel(logging.INFO)
    log.propagate = False  # or a configured root logger would repeat each line


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Turns a UserError in the body into one line and exit code 2. Also a decorator."""
    try:
        yield
    except UserError as error:
        log.error(error)
        raise SystemExit(2) from error


DEBUG = "DBSP_DEBUG"  # compare inputs across ranks at every attention, and check kernel tables
RECORD = "DBSP_RECORD"  # folder for recorded masks
RECORD_EVERY = "DBSP_RECORD_EVERY"  # record every n-th denoising step
RECORD_LAYERS = "DBSP_RECORD_LAYERS"  # layers to record, such as "0,5,10-12"
RECORD_LIMIT = "DBSP_RECORD_LIMIT"  # most bytes of a recording on disk, such as "2GiB"


def environment_value(name: str) -> str | None:
    """Returns the variable's value, or None if unset or empty."""
    return os.environ.get(name) or None


def environment_flag(name: str) -> bool:
    """Returns True if the variable is set to anything but "0" or empty."""
    return environment_value(name) not in (None, "0")


def environment_number(name: str, environment: Mapping[str, str] = os.environ) -> int | None:
    """Returns a launcher's variable, such as WORLD_SIZE, or None unless it is an integer of at most nine digits."""
    text = environment.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 10 else None


_PACKAGES = ("dbsp-attention", "torch", "numpy", "triton", "diffusers", "transformers", "xfuser", "para-attn")


def installed_version(name: str) -> str | None:
    """Returns the version of a pip package, or None if not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@functools.cache
def package_versions() -> dict[str, str]:
    """Returns the versions of Python and of the installed packages among `_PACKAGES`, by name."""
    versions = {"python": platform.python_version()} | {name: installed_version(name) for name in _PACKAGES}
    return {name: installed for name, installed in versions.items() if installed is not None}


def version_fingerprints(compare: bool) -> dict[str, int]:
    """Returns fingerprints of package versions by message, for `agree`; empty unless all ranks `compare`."""
    if not compare:
        return {}
    versions = package_versions()
    message = "the version of {} differs on rank(s) {{}}; install the same for all ranks"
    return {message.format(name): fingerprint_of(versions.get(name)) for name in ("python", *_PACKAGES)}


P = ParamSpec("P")
Result = TypeVar("Result")


def not_compiled(function: Callable[P, Result]) -> Callable[P, Result]:
    """Like torch.compiler.disable: breaks a compiled caller's graph and runs the function eagerly.

    Does not import torch's compiler. Not for module hooks: with torch.compile(fullgraph=True), the uncompiled caller
    of the hook would compile this wrapper.
    """
    excluded: list[Callable[P, Result]] = []

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not excluded:
            excluded.append(torch.compiler.disable(function))
        return excluded[0](*args, **kwargs)

    return call


def outside_inference(function: Callable[P, Result]) -> Callable[P, Result]:
    """Runs a function that caches tensors outside the caller's inference mode.

    Autograd rejects inference tensors, but routes and tables are cached for all passes of a size.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        if not torch.is_inference_mode_enabled():
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return call
