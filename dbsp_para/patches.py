"""Teaches para-attn's `parallelize_pipe` and `parallelize_transformer` the argument `attn="dbsp"`.

para-attn looks its adapters' functions up by name at each call, so wrapping them is enough, whatever was imported
first. Its first-block cache is taught to compare tensors that db-SP has sharded.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

from dbsp_core.config import ConfigLike
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.patching import PatchSet
from dbsp_para.attach import parallelize_pipe, parallelize_transformer
from dbsp_para.first_block_cache import over_real_tokens

__all__ = ["install", "uninstall"]

_ADAPTERS = ("wan", "cogvideox", "flux", "hunyuan_video", "mochi")  # the last three refuse attn="dbsp" with a reason
_installed: PatchSet | None = None


def install() -> bool:
    """Wraps para-attn's functions, once. Returns False where para-attn is not installed."""
    global _installed
    if _installed is None and importlib.util.find_spec("para_attn") is not None:
        with PatchSet() as patches:
            for name in _ADAPTERS:
                module = importlib.import_module(f"para_attn.context_parallel.diffusers_adapters.{name}")
                for ours in (parallelize_pipe, parallelize_transformer):
                    patches.set_attribute(module, ours.__name__, _with_dbsp(module, ours))
            cache = importlib.import_module("para_attn.first_block_cache.utils")
            patches.set_attribute(cache, "are_two_tensors_similar", over_real_tokens(cache.are_two_tensors_similar))
        _installed = patches
    return _installed is not None


def uninstall() -> None:
    """Leaves para-attn as it was."""
    global _installed
    if _installed is not None:
        _installed.detach()
        _installed = None


def _with_dbsp(module: ModuleType, ours: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the adapter's function of the same name, so that `attn="dbsp"` calls ours."""
    original = getattr(module, ours.__name__)

    @functools.wraps(original)
    def wrapped(
        model: Any,
        *,
        mesh: Any = None,
        attn: str | None = None,
        config: ConfigLike = None,
        **others: Any,
    ) -> Any:
        if attn is None:
            if config is not None:
                raise UserError('config is for db-SP; pass attn="dbsp" with it')
            return original(model, **({} if mesh is None else {"mesh": mesh}), **others)
        if attn != "dbsp":
            raise UserError(f'unknown attn {attn!r}; pass attn="dbsp", or leave it out for para-attn\'s own')
        if others:
            raise UserError(f'{", ".join(others)} cannot be combined with attn="dbsp"; leave it out')
        return ours(model, mesh=mesh, config=config)

    return wrapped
