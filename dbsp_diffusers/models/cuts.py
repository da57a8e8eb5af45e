"""Which tensors of a transformer hold tokens, and along which dimension: what ranks cut, and gather again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from dbsp_core.utils.errors import UserError

__all__ = ["OUTPUT", "Cut", "Cuts", "DerivedCuts", "Stream", "modules_at"]

Stream = Literal["video", "text", "packed"]
"""Whose tokens: "packed" for all of a model with one packed sequence, in that sequence's order."""


@dataclass(frozen=True)
class Cut:
    """A tensor, or a list of tensors, of whose tokens a rank keeps its share.

    stream: whose tokens. Of text, what follows the tokens that count is padding, and is left out
    dim:    along which they are
    ndim:   the tensor is cut only where it has so many dimensions; None: always
    grid:   they are along three dimensions, (t, h, w) from `dim` on, which the cut makes one
    after_text: text precedes the video along `dim`, whole, and stays as it is
    """

    stream: Stream
    dim: int
    ndim: int | None = None
    grid: bool = False
    after_text: bool = False


@dataclass(frozen=True)
class Cuts:
    """What is cut where, as diffusers' `_cp_plan` says it: modules by path, with "*" for each element of a list.

    inputs:   by module, its arguments by name; "" is the transformer itself
    outputs:  by module, its outputs by index
    gathered: by module, the output that holds a rank's share, and is made whole again
    """

    inputs: Mapping[str, Mapping[str, Cut]] = field(default_factory=dict)
    outputs: Mapping[str, Mapping[int, Cut]] = field(default_factory=dict)
    gathered: Mapping[str, Cut] = field(default_factory=dict)

    def of(self, transformer: nn.Module) -> Cuts:
        """Those of a transformer."""
        return self


@dataclass(frozen=True)
class DerivedCuts:
    """Cuts read from the `_cp_plan` of diffusers' class, which says all but whose tokens a tensor holds.

    streams: what is not `stream`, by the argument's name, or by "module.index" of an output; None: not cut
    stream:  of everything else
    beside:  more cuts
    """

    streams: Mapping[str, Stream | None] = field(default_factory=dict)
    stream: Stream = "video"
    beside: Cuts = field(default_factory=Cuts)

    def of(self, transformer: nn.Module) -> Cuts:
        """Those of a transformer. Raises UserError where this version of diffusers has no plan of it."""
        plan: Mapping[str, Any] | None = getattr(transformer, "_cp_plan", None)
        if not plan:
            raise UserError(
                f"this version of diffusers has no _cp_plan of {type(transformer).__name__}; install the one that "
                "db-SP is tested with (constraints.txt)"
            )
        inputs = {path: dict(cuts) for path, cuts in self.beside.inputs.items()}
        outputs = {path: dict(cuts) for path, cuts in self.beside.outputs.items()}
        gathered = dict(self.beside.gathered)
        for path, entry in plan.items():
            if not isinstance(entry, Mapping):
                gathered[path] = Cut(self.stream, entry.gather_dim)
                continue
            for name, part in entry.items():
                stream = self.streams.get(f"{path}.{name}" if part.split_output else name, self.stream)
                if stream is None:
                    continue
                cut = Cut(stream, part.split_dim, part.expected_dims)
                if part.split_output:
                    outputs.setdefault(path, {})[name] = cut
                else:
                    inputs.setdefault(path, {})[name] = cut
        return Cuts(inputs, outputs, gathered)


OUTPUT = {"proj_out": Cut("video", 1)}
"""Where most transformers' output is gathered."""


def modules_at(root: nn.Module, path: str) -> list[nn.Module]:
    """The modules that a path names: "" is the root, "*" each element of a list."""
    found = [root]
    for part in filter(None, path.split(".")):
        found = [child for one in found for child in (one.children() if part == "*" else (one.get_submodule(part),))]
    return found
