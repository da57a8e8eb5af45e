"""Which packages are there, and the versions of those that decide what is computed and exchanged."""

from __future__ import annotations

import functools
import importlib.util
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version

from dbsp_core.utils.errors import UserError
from dbsp_core.utils.fingerprint import fingerprint_of

__all__ = ["installed_version", "missing_packages", "package_versions", "require_packages", "version_marks"]

_PACKAGES = ("dbsp-attention", "torch", "numpy", "triton", "diffusers", "transformers", "xfuser", "para-attn")


def installed_version(name: str) -> str | None:
    """Of a package as pip knows it; None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def missing_packages(names: Iterable[str]) -> list[str]:
    """Those that cannot be found, by the names they are imported by."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def require_packages(what: str, names: Iterable[str], extra: str) -> None:
    """Raises UserError where `what` cannot run for want of packages. extra: installs them"""
    missing = missing_packages(names)
    if missing:
        raise UserError(f"{what} lacks {', '.join(missing)}; pip install 'dbsp-attention[{extra}]'")


@functools.cache
def package_versions() -> dict[str, str]:
    """Of Python and of those packages that are installed, by name."""
    found = {name: installed_version(name) for name in _PACKAGES}
    return {"python": platform.python_version()} | {name: one for name, one in found.items() if one is not None}


def version_marks(compare: bool) -> dict[str, int]:
    """For `check_consistent`: a complaint and a mark for each package. compare: whether marks tell versions apart"""
    found = package_versions() if compare else {}
    complaint = "the version of {} differs on rank(s) {{}}; install the same for all ranks"
    return {complaint.format(name): fingerprint_of(found.get(name)) for name in ("python", *_PACKAGES)}
