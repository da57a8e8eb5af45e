"""Adds the argument `attn="dbsp"` to para-attn's `parallelize_pipe` and `parallelize_transformer`.

para-attn looks up its adapters' functions by name at each call, so wrapping them works in any import order. Its
first-block cache is wrapped to compare tensors that db-SP has sharded, so that all ranks skip the steps that one
process would skip.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from dbsp_core.config import ConfigLike
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.patching import PatchSet, require_names
from dbsp_diffusers.sharding.step_caches import ForwardRanks
from dbsp_para.attach import parallelize_pipe, parallelize_transformer

_ADAPTERS = tuple(
    f"para_attn.context_parallel.diffusers_adapters.{name}"
    for name in ("wan", "cogvideox", "flux", "hunyuan_video", "mochi")
)
_CACHE = "para_attn.first_block_cache.utils"
_WRAPPED = {
    **{f"{adapter}:parallelize_pipe": ("pipe",) for adapter in _ADAPTERS},
    **{f"{adapter}:parallelize_transformer": ("mesh",) for adapter in _ADAPTERS},
    f"{_CACHE}:are_two_tensors_similar": ("t1", "t2", "threshold", "parallelized"),
}
"""Wrapped functions with required arguments, checked before wrapping anything."""
_installed: PatchSet | None = None


def install() -> bool:
    """Wraps para-attn's functions once. Returns False if para-attn is not installed.

    Raises UserError, without wrapping anything, if para-attn lacks the expected functions.
    """
    global _installed
    if _installed is None and importlib.util.find_spec("para_attn") is not None:
        require_names("para-attn", _WRAPPED, "install para-attn 0.3.38, or use dbsp_diffusers.enable without it")
        with PatchSet() as patches:
            for module in map(importlib.import_module, _ADAPTERS):
                for ours in (parallelize_pipe, parallelize_transformer):
                    patches.set_attribute(module, ours.__name__, _with_dbsp(module, ours))
            cache = importlib.import_module(_CACHE)
            patches.set_attribute(cache, "are_two_tensors_similar", _over_real_tokens(cache.are_two_tensors_similar))
        _installed = patches
    return _installed is not None


def uninstall() -> None:
    """Restores para-attn."""
    global _installed
    if _installed is not None:
        _installed.detach()
        _installed = None


def _with_dbsp(module: ModuleType, ours: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps the adapter's function of the same name to call ours for `attn="dbsp"`."""
    original = getattr(module, ours.__name__)

    @functools.wraps(original)
    def wrapped(
        model: Any, *, mesh: Any = None, attn: str | None = None, config: ConfigLike = None, **others: Any
    ) -> Any:
        if attn is None:
            if config is not None:
                raise UserError('config is for db-SP; pass attn="dbsp" with it')
            return original(model, **({} if mesh is None else {"mesh": mesh}), **others)
        if attn != "dbsp":
            raise UserError(f'unknown attn {attn!r}; pass attn="dbsp", or omit it for para-attn\'s own')
        if others:
            raise UserError(f'{", ".join(others)} cannot be combined with attn="dbsp"; remove it')
        return ours(model, mesh=mesh, config=config)

    return wrapped


def _over_real_tokens(original: Callable[..., bool]) -> Callable[..., bool]:
    """Wraps `are_two_tensors_similar` to compare the real tokens of all ranks if db-SP shards them. Collective.

    The cache passes the transformer's `_is_parallelized` and the first block's residuals of the last computed pass and
    of this one, [B, shard, C]. para-attn itself averages means over all ranks, including padding.
    """

    @torch.compiler.disable
    @functools.wraps(original)
    def are_similar(t1: torch.Tensor, t2: torch.Tensor, *, threshold: float, parallelized: Any = False) -> bool:
        if not isinstance(parallelized, ForwardRanks):
            return original(t1, t2, threshold=threshold, parallelized=parallelized)
        if threshold <= 0 or t1.shape != t2.shape:
            return False
        difference, size = parallelized.change(t1, t2)
        return difference < threshold * size

    return are_similar
