"""A user's own function or class, by its name."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from dbsp_core.utils.errors import UserError, kind_of

__all__ = ["import_callable"]


def import_callable(name: str, what: str, missing: str, advice: str) -> Callable[..., Any]:
    """Imports "package.module:name".

    Args:
        what: The kind of thing, for messages.
        missing: The message for what is no such name.
        advice: What to name in place of something that cannot be called.

    Raises:
        UserError: For another form, a module that cannot be imported, and a name that is not there or not callable.
    """
    module, colon, path = name.partition(":")
    if not (colon and module and path):
        raise UserError(missing)
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        raise UserError(
            f"{what} {name}: importing {module} failed ({type(error).__name__}: {error}); put its folder on "
            "PYTHONPATH, on every machine, and see that it imports by itself"
        ) from error
    for part in path.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        is_what = "has no such name" if found is None else f"names {kind_of(found)}, which cannot be called"
        raise UserError(f"{what} {name}: {module} {is_what}; name {advice}")
    return found
