"""State that db-SP stores on a pipeline and its transformers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from dbsp_core.runtime.session import AttentionSession
from dbsp_diffusers.models.transformers import transformers_in
from dbsp_diffusers.patching import PatchSet

STATE = "_dbsp"  # attribute of a pipeline and its transformers with the state, so that all are freed together


@dataclass(frozen=True)
class Attached:
    """State of a pipeline's transformers, or of a transformer without a pipeline."""

    patches: PatchSet
    sessions: Mapping[nn.Module, AttentionSession]  # by transformer
    framework: str

    @property
    def first(self) -> AttentionSession:
        return next(iter(self.sessions.values()))


def attached_to(model: Any) -> Attached | None:
    """Returns the state of a pipeline, or of its first transformer that has any, or None."""
    return next(iter(all_attached_to(model)), None)


def all_attached_to(model: Any) -> list[Attached]:
    """Returns all states of a pipeline and its transformers, possibly compiled.

    A pipeline keeps its state if its transformers are replaced. There are several states if transformers were enabled
    one by one.
    """
    parts = (getattr(part, "_orig_mod", part) for part in transformers_in(model).values())
    states = (getattr(part, "__dict__", {}).get(STATE) for part in (model, *parts))
    return list({id(state): state for state in states if state is not None}.values())


def session_of(model: Any) -> AttentionSession | None:
    """Returns the session of an enabled pipeline or transformer.

    Args:
        model: The pipeline or transformer, possibly compiled.

    Returns:
        Its session with plans, strategies and statistics (of the first of two transformers), or None if db-SP is not
        enabled.
    """
    state = attached_to(model)
    if state is None:
        return None
    transformer = getattr(model, "_orig_mod", model)
    return state.sessions[transformer] if isinstance(transformer, nn.Module) else state.first
