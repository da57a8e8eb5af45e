"""para-attn's device mesh as db-SP's groups of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.layout.strategy import Strategy
from dbsp_core.utils.errors import UserError

__all__ = ["Ranks"]

_DIMENSIONS = ("batch", "ring", "ulysses")


@dataclass(frozen=True)
class Ranks:
    """The groups this rank is in.

    everyone: all ranks that make one video together
    sequence: those that share the sequence of the same samples
    batch:    those that hold the same part of the sequence, of other samples
    strategy: how the mesh uses the ranks of a sequence
    """

    everyone: SequenceGroup
    sequence: SequenceGroup
    batch: SequenceGroup
    strategy: Strategy

    @classmethod
    def of(cls, mesh: Any) -> Ranks:
        """mesh: para-attn's, with dimensions (batch, ring, ulysses); None: all ranks share the sequence, by heads.

        Raises UserError for anything else, and on a rank outside the mesh. Collective where it makes new groups.
        """
        if mesh is None:
            group = SequenceGroup.of()
            return cls(group, group, SequenceGroup(0, 1), Strategy(group.size, 1))
        names = getattr(mesh, "mesh_dim_names", None) or ()
        if not set(_DIMENSIONS) <= set(names):
            raise UserError(
                f"mesh must be a device mesh with dimensions batch, ring and ulysses, got {_describe(mesh, names)}; "
                "make it with para_attn.context_parallel.init_context_parallel_mesh"
            )
        if mesh.get_coordinate() is None:
            raise UserError("this rank is outside the mesh; parallelize on the mesh's ranks only")
        sequence = SequenceGroup.of(mesh["ring", "ulysses"]._flatten().get_group())
        strategy = Strategy(mesh["ulysses"].size(), mesh["ring"].size())
        if mesh["batch"].size() == 1:
            return cls(sequence, sequence, SequenceGroup(0, 1), strategy)
        everyone = SequenceGroup.of(mesh[_DIMENSIONS]._flatten().get_group())
        return cls(everyone, sequence, SequenceGroup.of(mesh["batch"].get_group()), strategy)


def _describe(mesh: Any, names: tuple[str, ...]) -> str:
    return f"dimensions {', '.join(names)}" if names else f"a {type(mesh).__name__} without such names"
