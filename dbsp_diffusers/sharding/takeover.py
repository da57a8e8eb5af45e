"""Reads which ranks share a sequence from diffusers' `enable_parallelism` or from a device mesh.

diffusers' own context parallelism is suspended while db-SP is enabled, and afterwards is as it was. This needs
names that diffusers keeps to itself: tests/diffusers/models/test_takeover.py fails where another version has others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.layout.strategy import Strategy
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.patching import PatchSet

__all__ = ["SequenceRanks", "ranks_of_mesh", "suspend_context_parallelism"]

_DIMENSIONS = ("ring", "ulysses")
_HOOKS = ("cp_input---", "cp_output---")
"""How the names of diffusers' hooks begin that cut and gather."""


@dataclass(frozen=True)
class SequenceRanks:
    """The ranks that share a sequence, and how."""

    group: SequenceGroup
    strategy: Strategy


def ranks_of_mesh(mesh: Any) -> SequenceRanks:
    """The ranks along the dimensions "ring" and "ulysses" of a device mesh, whatever others it has.

    One of them may be missing. Raises UserError, on all ranks, for another mesh, and on a rank outside it. Collective.
    """
    names = getattr(mesh, "mesh_dim_names", None) or ()
    present = [name for name in names if name in _DIMENSIONS]
    if not present:
        what = f"dimensions {', '.join(names)}" if names else f"a {type(mesh).__name__} without such names"
        raise UserError(f"mesh must be a device mesh with a dimension ring or ulysses, got {what}")
    if present == ["ulysses", "ring"]:
        raise UserError("the mesh's dimension ring must come before ulysses, as in diffusers' own meshes")
    if mesh.get_coordinate() is None:
        raise UserError("this rank is outside the mesh; enable db-SP on the mesh's ranks only")
    part = mesh[tuple(present)]
    group = (part._flatten() if len(present) > 1 else part).get_group()
    degrees = {name: mesh[name].size() for name in present}
    return SequenceRanks(SequenceGroup.of(group), Strategy(degrees.get("ulysses", 1), degrees.get("ring", 1)))


def suspend_context_parallelism(transformers: Iterable[nn.Module], patches: PatchSet) -> SequenceRanks | None:
    """Suspends what `enable_parallelism` did to the transformers, and returns the ranks of its sequences.

    Returns None where it was not called. Raises UserError for tensor parallelism, and for ranks that differ.
    """
    found: SequenceRanks | None = None
    for transformer in transformers:
        config = getattr(transformer, "_parallel_config", None)
        if config is None:
            continue
        context = getattr(config, "context_parallel_config", None)
        if context is None:
            raise UserError("db-SP does not go with diffusers' tensor parallelism; load the transformer without it")
        ranks = ranks_of_mesh(context._mesh)
        if found is not None and ranks.strategy != found.strategy:
            raise UserError("enable_parallelism gave the two transformers different degrees; give both the same")
        found = ranks
        patches.set_attribute(transformer, "_parallel_config", None)
        for module in transformer.modules():
            _suspend(module, patches)
    return found


def _suspend(module: nn.Module, patches: PatchSet) -> None:
    processor = getattr(module, "processor", None)
    if getattr(processor, "_parallel_config", None) is not None:
        patches.set_attribute(processor, "_parallel_config", None)
    hooks = getattr(getattr(module, "_diffusers_hook", None), "hooks", {})
    for hook in (hook for name, hook in hooks.items() if name.startswith(_HOOKS)):
        patches.set_attribute(hook.fn_ref, "pre_forward", _inputs_as_they_are)
        patches.set_attribute(hook.fn_ref, "post_forward", _output_as_it_is)


def _inputs_as_they_are(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def _output_as_it_is(module: nn.Module, output: Any) -> Any:
    return output
