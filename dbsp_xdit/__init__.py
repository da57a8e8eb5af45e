"""db-SP for xDiT (xfuser): `xdit … --sp-backend dbsp`, or `attach(pipe, config)` in your own script.

Imports lazily, since every import of torch loads `dbsp_xdit.import_hook`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dbsp_xdit.attachment import attach, detach, session_of

__all__ = ["attach", "detach", "session_of"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from dbsp_xdit import attachment

        return getattr(attachment, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
