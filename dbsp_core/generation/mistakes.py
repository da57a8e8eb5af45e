"""How a rank ends on a user's mistake."""

from __future__ import annotations

import sys
from typing import NoReturn

from dbsp_core.errors import UserError
from dbsp_core.generation.launching import ERROR

__all__ = ["exit_with"]


def exit_with(error: UserError) -> NoReturn:
    """One line for a user's mistake, and exit code 2."""
    sys.stderr.write(f"{ERROR}{error}\n")
    sys.stderr.flush()
    raise SystemExit(2) from error
