"""Installed packages, and the versions of those on which results and exchanges depend."""

from __future__ import annotations

import functools
import importlib.util
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from dbsp_core.utils.errors import UserError
from dbsp_core.utils.fingerprint import fingerprint_of
from dbsp_kernels.advice import install_command

__all__ = ["installed_version", "missing_packages", "package_versions", "require_packages", "version_marks"]

_PACKAGES = ("dbsp-attention", "torch", "numpy", "triton", "diffusers", "transformers", "xfuser", "para-attn")


def installed_version(name: str) -> str | None:
    """Version of a package, by pip's name; None if it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def missing_packages(names: Iterable[str]) -> list[str]:
    """The packages, by import name, that cannot be found."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def require_packages(what: str, names: Iterable[str], extra: str) -> None:
    """Raises UserError if packages that `what` needs are missing, which `extra` would install."""
    missing = missing_packages(names)
    if missing:
        raise UserError(f"{what} lacks {', '.join(missing)}; {install_command(extra)}")


@functools.cache
def package_versions() -> dict[str, str]:
    """Versions of Python and of the installed packages among `_PACKAGES`, by name."""
    found = {name: installed_version(name) for name in _PACKAGES}
    return {"python": platform.python_version()} | {name: one for name, one in found.items() if one is not None}


def version_marks(compare: bool) -> dict[str, int]:
    """Complaints and marks of packages for `check_consistent`; unless `compare`, marks don't depend on versions."""
    found = package_versions() if compare else {}
    complaint = "the version of {} differs on rank(s) {{}}; install the same for all ranks"
    return {complaint.format(name): fingerprint_of(found.get(name)) for name in ("python", *_PACKAGES)}
