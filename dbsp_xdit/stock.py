"""xfuser's pipelines and transformers turned back into diffusers' own, which db-SP shards."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from dbsp_core.utils.errors import UserError
from dbsp_diffusers.attached import transformers_in
from dbsp_diffusers.patching import PatchSet, has_class_forward

__all__ = ["turned_back"]


def turned_back(pipe: Any, patches: PatchSet) -> Any:
    """Returns the diffusers pipeline that `pipe` is or wraps, with transformers of diffusers' own classes.

    A pipeline in xfuser's wrapper runs as diffusers' own from then on, and returns its output on every rank. Weights
    stay where they are. Whatever is not xfuser's stays as it is.
    """
    if _wraps(pipe):
        # xfuser's wrapper then calls the wrapped pipeline, once it has shared out the prompts
        patches.set_attribute(pipe, "use_naive_forward", lambda: True)
        pipe = pipe.module
        for name in ("transformer", "scheduler"):
            if _wraps(getattr(pipe, name, None)):
                patches.set_attribute(pipe, name, getattr(pipe, name).module)
    for transformer in transformers_in(pipe).values():
        _unwrap_parts(transformer, patches)
        if _is_xfusers(transformer):
            _restore_class(transformer, patches)
    return pipe


def _is_xfusers(part: Any) -> bool:
    return type(part).__module__.partition(".")[0] == "xfuser"


def _wraps(part: Any) -> bool:
    """Returns True for one of xfuser's wrappers that holds what it wraps."""
    return _is_xfusers(part) and "module" in {**vars(part), **vars(part).get("_modules", {})}


def _unwrap_parts(module: nn.Module, patches: PatchSet) -> None:
    """Puts what xfuser has wrapped among a module's parts back into its place."""

    for name, part in list(module.named_children()):
        inner: Any = part.module if _wraps(part) else part
        if inner is not part:
            module._modules[name] = inner
            patches.on_detach(functools.partial(module._modules.__setitem__, name, part))
        _unwrap_parts(inner, patches)


def _restore_class(transformer: nn.Module, patches: PatchSet) -> None:
    """Gives an instance of a subclass of xfuser's the class of diffusers' that it derives from, and its processors."""
    own = type(transformer)
    base = next((cls for cls in own.__mro__ if cls.__module__.partition(".")[0] == "diffusers"), None)
    if base is None or not hasattr(base, "from_config"):
        return  # db-SP says which classes it knows
    if not has_class_forward(transformer):
        raise UserError(f"the forward of this {own.__name__} was replaced; attach db-SP before step caches, not after")
    with torch.device("meta"):
        plain = base.from_config(transformer.config)
    patches.replace_class(transformer, base)
    parts = dict(transformer.named_modules())
    for name, module in plain.named_modules():
        if _is_xfusers(getattr(parts.get(name), "processor", None)):
            patches.set_attribute(parts[name], "processor", module.processor)
