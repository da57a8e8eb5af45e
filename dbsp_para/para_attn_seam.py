"""Teaches para-attn's `parallelize_pipe` and `parallelize_transformer` the argument `attn="dbsp"`.

para-attn looks its adapters' `parallelize_transformer` up by name at each call, so wrapping those two is enough,
whatever was imported first.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

from dbsp_core.config import ConfigLike
from dbsp_core.hosts import Attachment
from dbsp_para.parallelize import parallelize_transformer

__all__ = ["install", "uninstall"]

_ADAPTERS = ("wan", "cogvideox")
_installed: Attachment | None = None


def install() -> bool:
    """Wraps para-attn's adapters, once. returns: whether para-attn is there to be wrapped."""
    global _installed
    if _installed is None and importlib.util.find_spec("para_attn") is not None:
        attachment = Attachment()
        for name in _ADAPTERS:
            module = importlib.import_module(f"para_attn.context_parallel.diffusers_adapters.{name}")
            attachment.set_attribute(module, "parallelize_transformer", _with_dbsp(module))
        _installed = attachment
    return _installed is not None


def uninstall() -> None:
    """Leaves para-attn as it was."""
    global _installed
    if _installed is not None:
        _installed.detach()
        _installed = None


def _with_dbsp(module: ModuleType) -> Callable[..., Any]:
    original = module.parallelize_transformer

    @functools.wraps(original)
    def wrapped(
        transformer: Any, *, mesh: Any = None, attn: str | None = None, config: ConfigLike = None, **others: Any
    ) -> Any:
        if attn is None:
            if config is not None:
                raise ValueError('config is for db-SP; pass attn="dbsp" with it')
            return original(transformer, mesh=mesh, **others)
        if attn != "dbsp":
            raise ValueError(f'unknown attn {attn!r}; pass attn="dbsp", or leave it out for para-attn\'s own')
        return parallelize_transformer(transformer, mesh=mesh, config=config, **others)

    return wrapped
