"""Masks from a user's function."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch

from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import CANONICAL, BlockGrid
from dbsp_core.sources.base import BlockSizes, Changes, MaskRequest
from dbsp_core.utils.errors import SettingError, UserError, blame_setting, kind_of
from dbsp_core.utils.schema import convert, require_choice


def _read_function(value: Any, name: str) -> Any:
    return value if callable(value) else convert(value, str, name)


@dataclass(frozen=True)
class CallableSource(BlockSizes):
    """Masks from function(grid, request, **parameters).

    Attributes:
        function: "package.module:name", or in Python the function itself, which is stored by name. Takes the BlockGrid
            and the MaskRequest; returns a bool numpy array or tensor [heads, nq, nk], or [nq, nk] for all heads, equal
            on every rank.
        parameters: Keyword arguments of the function.
        depends_on: "nothing": one mask for all layers and steps; "layer": one per layer; "step": one per layer,
            denoising step and CFG pass. Other fields of the request are 0.
        token_orders: Token order of the function's blocks, one for all heads or one per head (see `BlockGrid`).

    Raises:
        UserError: The function cannot be imported, raises, or returns something else.
    """

    function: str | Callable[..., Any] = field(default="", metadata={"read": _read_function})
    parameters: Mapping[str, Any] = field(default_factory=dict)
    depends_on: str = "layer"
    token_orders: tuple[str, ...] = (CANONICAL,)
    _given: Callable[..., Any] | None = field(default=None, init=False, repr=False, metadata={"setting": False})

    def __post_init__(self) -> None:
        super().__post_init__()
        if callable(self.function):
            object.__setattr__(self, "_given", self.function)
            object.__setattr__(self, "function", _name_of(self.function))
        require_choice("depends_on", self.depends_on, ("nothing", "layer", "step"), "mask.")
        strange = [name for name in self.parameters if not isinstance(name, str)]
        if strange:
            message = f"parameters of {self.function} need names, {strange[0]!r} is none; quote it"
            raise SettingError(message, ("parameters",))
        with blame_setting("function"):
            self._function  # noqa: B018  rejects a bad name early

    @cached_property
    def _function(self) -> Callable[..., Any]:
        if self._given is not None:
            return self._given
        module, colon, path = str(self.function).partition(":")
        if not (colon and module and path):
            raise UserError(
                f"mask source 'callable' needs function: package.module:name, got {self.function!r}; for example "
                "{source: callable, function: 'my_masks:diagonal'}"
            )
        try:
            function: Any = importlib.import_module(module)
        except Exception as error:
            raise UserError(
                f"mask function {self.function}: importing {module} failed ({type(error).__name__}: {error}); put its "
                "folder on PYTHONPATH, on every machine, and check that it imports alone"
            ) from error
        for part in path.split("."):
            function = getattr(function, part, None)
        if not callable(function):
            is_what = "has no such name" if function is None else f"names {kind_of(function)}, which cannot be called"
            raise UserError(f"mask function {self.function}: {module} {is_what}; name a function(grid, request)")
        return cast(Callable[..., Any], function)

    @property
    def changes(self) -> Changes:
        return "per_step" if self.depends_on == "step" else "never"

    def cache_key(self, request: MaskRequest) -> Hashable:
        seen = self._seen(request)
        return seen.layer, seen.step, seen.cfg_branch

    def grid(self, request: MaskRequest) -> BlockGrid:
        if len(self.token_orders) not in (1, request.heads):
            raise UserError(
                f"mask function {self.function}: {len(self.token_orders)} token_orders for {request.heads} heads; "
                "give one order for all heads or one per head"
            )
        return replace(super().grid(request), orders=self.token_orders)

    def mask(self, request: MaskRequest) -> BlockMask:
        grid = self.grid(request)
        try:
            result = self._function(grid, self._seen(request), **self.parameters)
        except Exception as error:
            raise UserError(
                f"mask function {self.function} raised {type(error).__name__}: {error} for layer {request.layer}; "
                "correct it, or its parameters"
            ) from error
        if not isinstance(result, (np.ndarray, torch.Tensor)):
            raise UserError(
                f"mask function {self.function} returned {kind_of(result)}; return a bool numpy array or torch tensor"
            )
        if result.dtype not in (np.dtype(bool), torch.bool):
            raise UserError(
                f"mask function {self.function} returned {result.dtype}; compare with a threshold, to return bool"
            )
        shape, expected = tuple(result.shape), (request.heads, grid.nq, grid.nk)
        if shape not in (expected, expected[1:]):
            raise UserError(
                f"mask function {self.function} returned shape {list(shape)}; return {list(expected)}, "
                f"heads × query blocks × key blocks, or [{grid.nq}, {grid.nk}] for all heads"
            )
        # copy, since the function may change its result
        bits = torch.from_numpy(np.array(result)) if isinstance(result, np.ndarray) else result.detach().clone()
        return BlockMask(bits.expand(expected).contiguous(), grid)

    def _seen(self, request: MaskRequest) -> MaskRequest:
        """Returns the request with 0 in fields that the mask must not depend on."""
        if self.depends_on == "step":
            return request
        return replace(request, layer=request.layer if self.depends_on == "layer" else 0, step=0, cfg_branch=0)


def _name_of(function: Callable[..., Any]) -> str:
    """Returns "package.module:name" of a function, or of a callable object's class."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"
