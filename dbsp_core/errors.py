"""`UserError`, which the lowest package defines so that every package can raise it."""

from __future__ import annotations

from dbsp_kernels.errors import UserError

__all__ = ["UserError"]
