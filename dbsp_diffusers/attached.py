"""What is attached to a transformer: kept on the transformer itself, so that both are freed together."""

from __future__ import annotations

from typing import Any

from dbsp_core.runtime.session import AttentionSession
from dbsp_diffusers.patching import PatchSet

__all__ = ["get_session", "keep", "release"]

_NAME = "_dbsp"


def keep(transformer: Any, attachment: PatchSet, session: AttentionSession) -> None:
    """Remembers both until `release`."""
    attachment.set_attribute(transformer, _NAME, (attachment, session))


def get_session(transformer: Any) -> AttentionSession | None:
    """The session of a transformer, compiled or not, if any."""
    _, session = vars(_uncompiled(transformer)).get(_NAME, (None, None))
    return session


def release(transformer: Any) -> None:
    """Undoes what was attached; nothing happens where nothing is."""
    attachment, _ = vars(_uncompiled(transformer)).get(_NAME, (None, None))
    if attachment is not None:
        attachment.detach()


def _uncompiled(transformer: Any) -> Any:
    return getattr(transformer, "_orig_mod", transformer)  # as torch.compile wraps it
