"""Versions of the packages that decide what is computed and exchanged."""

from __future__ import annotations

import functools
import platform
from importlib.metadata import PackageNotFoundError, version

from dbsp_core.utils.fingerprint import fingerprint_of

__all__ = ["installed_version", "package_versions", "version_marks"]

_PACKAGES = ("dbsp-attention", "torch", "numpy", "triton", "diffusers", "transformers", "xfuser", "para-attn")


def installed_version(name: str) -> str | None:
    """Of a package as pip knows it; None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


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
