"""Attaches db-SP to a pipeline in an xfuser process, converting its parts back to diffusers' classes."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from dbsp_core.comm.consistency import run_consistently
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.config import ConfigLike
from dbsp_core.runtime.session import AttentionSession
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.api import disable
from dbsp_diffusers.api import session_of as session_of  # for `dbsp_xdit` itself
from dbsp_diffusers.attach import Framework, attach_framework
from dbsp_diffusers.models.transformers import transformers_in
from dbsp_diffusers.patching import PatchSet, has_class_forward
from dbsp_xdit.command_line import strategy_from


def attach(pipe: Any, config: ConfigLike = None) -> AttentionSession:
    """Enables db-SP on a pipeline's transformers, on xfuser's sequence-parallel group. Collective.

    Transformers and pipelines of xfuser's classes become diffusers' until `detach`. Call it after initializing
    xfuser's groups and before `torch.compile`.

    Args:
        pipe: A pipeline of diffusers or xfuser with a transformer that db-SP supports.
        config: A `DbspConfig`, a mapping, the path of a YAML file, a mask, or None for the settings shipped for the
            transformer's checkpoint (dense attention if there are none).

    Returns:
        The session of the pipeline's first transformer (Wan2.2 has two), with plans and statistics.

    Raises:
        UserError: The transformer is unknown or was modified by other code, or the parallelism or strategy is not
            supported; raised on all ranks.
    """
    from xfuser.core.distributed import get_ring_parallel_world_size, get_ulysses_parallel_world_size

    sequence, guidance, world = _groups()
    whole = guidance.size > 1 and world.size == sequence.size * guidance.size
    with PatchSet() as patches:
        stock = run_consistently(sequence.control(), lambda: _in_diffusers_classes(pipe, patches, guidance.size))
        framework = Framework(
            "xdit",
            sequence,
            choose_strategy=lambda config: strategy_from(
                config, get_ulysses_parallel_world_size(), get_ring_parallel_world_size()
            ),
            decoders=world if whole else None,  # both halves of guidance decode the same video
        )
        return attach_framework(stock, config, framework, patches=patches)


def detach(pipe: Any) -> None:
    """Undoes `attach`, restoring attributes, hooks and classes.

    Args:
        pipe: The pipeline, possibly compiled; if db-SP is not attached, nothing happens.
    """
    disable(pipe)


def _groups() -> list[SequenceGroup]:
    """Returns the groups that share a sequence, and CFG passes, and of all ranks. Raises UserError for others."""
    from xfuser.core import distributed as xfuser

    if not xfuser.model_parallel_is_initialized():
        raise UserError(
            "xfuser's process groups are not initialized; call xfuser.core.distributed.initialize_runtime_state, or "
            "build the pipeline with xfuser, before dbsp_xdit.attach"
        )
    for kind, degree in (
        ("pipefusion_parallel_degree", xfuser.get_pipeline_parallel_world_size()),
        ("tensor_parallel_degree", xfuser.get_tensor_model_parallel_world_size()),
    ):
        if degree > 1:
            raise UserError(f"db-SP does not support {kind}={degree}; leave it at 1")
    groups = xfuser.get_sp_group(), xfuser.get_cfg_group(), xfuser.get_world_group()
    return [SequenceGroup.from_group(group.device_group) for group in groups]


def _in_diffusers_classes(pipe: Any, patches: PatchSet, guidance: int) -> Any:
    """Returns the diffusers pipeline that `pipe` is or wraps, with transformers of diffusers' classes.

    A pipeline in xfuser's wrapper then runs as in diffusers and returns its output on every rank. Weights do not move.
    """
    if _wraps(pipe):
        # xfuser's wrapper then distributes the prompts and calls the wrapped pipeline
        patches.set_attribute(pipe, "use_naive_forward", lambda: True)
        pipe = pipe.module
        for name in ("transformer", "scheduler"):
            if _wraps(getattr(pipe, name, None)):
                patches.set_attribute(pipe, name, getattr(pipe, name).module)
    if guidance > 1 and not _is_xfusers(pipe):
        raise UserError(
            f"use_cfg_parallel: {type(pipe).__name__} does not run the two CFG passes on two groups of ranks; "
            "remove it and double the Ulysses or ring degree"
        )
    for transformer in transformers_in(pipe).values():
        _unwrap_parts(transformer, patches)
        if _is_xfusers(transformer):
            _restore_class(transformer, patches)
    return pipe


def _is_xfusers(part: Any) -> bool:
    return type(part).__module__.partition(".")[0] == "xfuser"


def _wraps(part: Any) -> bool:
    """Returns True for xfuser's wrappers that hold the wrapped object."""
    return _is_xfusers(part) and "module" in {**vars(part), **vars(part).get("_modules", {})}


def _unwrap_parts(module: nn.Module, patches: PatchSet) -> None:
    for name, part in list(module.named_children()):
        inner: Any = part.module if _wraps(part) else part
        if inner is not part:
            module._modules[name] = inner
            patches.on_detach(functools.partial(module._modules.__setitem__, name, part))
        _unwrap_parts(inner, patches)


def _restore_class(transformer: nn.Module, patches: PatchSet) -> None:
    """Gives a transformer of an xfuser subclass its diffusers base class and processors."""
    name, classes = type(transformer).__name__, type(transformer).__mro__
    base = next((cls for cls in classes if cls.__module__.partition(".")[0] == "diffusers"), None)
    if base is None or not hasattr(base, "from_config"):
        raise UserError(f"db-SP does not know {name}, which derives from no transformer class of diffusers")
    if not has_class_forward(transformer):
        raise UserError(f"the forward of this {name} was replaced; attach db-SP before step caches, not after")
    with torch.device("meta"):
        plain = base.from_config(transformer.config)
    patches.replace_class(transformer, base)
    parts = dict(transformer.named_modules())
    for path, module in plain.named_modules():
        if _is_xfusers(getattr(parts.get(path), "processor", None)):
            patches.set_attribute(parts[path], "processor", module.processor)
