"""para-attn's device mesh as db-SP's groups of ranks."""

from __future__ import annotations

from typing import Any, TypedDict

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.layout.strategy import Strategy
from dbsp_core.utils.errors import UserError

__all__ = ["MeshGroups", "groups_of"]

_DIMENSIONS = ("batch", "ring", "ulysses")


class MeshGroups(TypedDict, total=False):
    """Arguments of `dbsp_diffusers.enable`."""

    group: SequenceGroup
    batch_group: SequenceGroup
    everyone: SequenceGroup
    strategy: Strategy


def groups_of(mesh: Any) -> MeshGroups:
    """Returns the groups of a mesh of para-attn's; without one all ranks share the sequence, by heads.

    Collective where it makes new groups.

    Args:
        mesh: A device mesh with dimensions (batch, ring, ulysses), or None.

    Raises:
        UserError: The mesh is anything else, or this rank is outside it.
    """
    if mesh is None:
        return {}
    names = getattr(mesh, "mesh_dim_names", None) or ()
    if not set(_DIMENSIONS) <= set(names):
        what = f"dimensions {', '.join(names)}" if names else f"a {type(mesh).__name__} without such names"
        raise UserError(
            f"mesh must be a device mesh with dimensions batch, ring and ulysses, got {what}; "
            "make it with para_attn.context_parallel.init_context_parallel_mesh"
        )
    if mesh.get_coordinate() is None:
        raise UserError("this rank is outside the mesh; parallelize on the mesh's ranks only")
    groups: MeshGroups = {
        "group": SequenceGroup.of(mesh["ring", "ulysses"]._flatten().get_group()),
        "strategy": Strategy(mesh["ulysses"].size(), mesh["ring"].size()),
    }
    if mesh["batch"].size() > 1:
        groups["everyone"] = SequenceGroup.of(mesh[_DIMENSIONS]._flatten().get_group())
        groups["batch_group"] = SequenceGroup.of(mesh["batch"].get_group())
    return groups
