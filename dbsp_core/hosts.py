"""What both host adapters share: changes that can be undone, and a sequence laid out anew around a transformer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Attachment", "patch_tokens", "unpatch_tokens"]

_MISSING = object()


class Attachment:
    """A stack of changes to a host; `detach` undoes them in reverse, once."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def set_attribute(self, target: Any, name: str, value: Any) -> None:
        """Sets an instance attribute; afterwards the instance has the old one, or none, as before."""
        before = vars(target).get(name, _MISSING)
        setattr(target, name, value)

        def undo() -> None:
            if before is _MISSING:
                delattr(target, name)
            else:
                setattr(target, name, before)

        self._undo.append(undo)

    def hook(self, register: Callable[..., Any], function: Callable[..., Any], **options: Any) -> None:
        """Registers a module hook, for example hook(module.register_forward_hook, function, with_kwargs=True)."""
        self._undo.append(register(function, **options).remove)

    def on_detach(self, function: Callable[[], None]) -> None:
        self._undo.append(function)

    def detach(self) -> None:
        """Leaves the host as it was."""
        while self._undo:
            self._undo.pop()()


def patch_tokens(sample: torch.Tensor, patch: tuple[int, int, int]) -> torch.Tensor:
    """[B, C, F, H, W] → [B, tokens, C·patch], tokens in (t, h, w) order."""
    batch, channels = sample.shape[:2]
    cut = _cut(sample, patch)
    return cut.permute(0, 2, 4, 6, 1, 3, 5, 7).reshape(batch, -1, channels * patch[0] * patch[1] * patch[2])


def unpatch_tokens(tokens: torch.Tensor, like: torch.Tensor, patch: tuple[int, int, int]) -> torch.Tensor:
    """The inverse of `patch_tokens`, to the shape of `like`."""
    batch, channels = like.shape[:2]
    counts = [size // p for size, p in zip(like.shape[2:], patch, strict=True)]
    cut = tokens.reshape(batch, *counts, channels, *patch).permute(0, 4, 1, 5, 2, 6, 3, 7)
    return cut.reshape(like.shape)


def _cut(sample: torch.Tensor, patch: tuple[int, int, int]) -> torch.Tensor:
    """[B, C, F, H, W] → [B, C, f, pt, h, ph, w, pw]."""
    sizes = []
    for size, p in zip(sample.shape[2:], patch, strict=True):
        sizes += [size // p, p]
    return sample.reshape(*sample.shape[:2], *sizes)
