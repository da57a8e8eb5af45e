"""Which tensors of a transformer hold tokens, and along which dimension: what ranks cut, and gather again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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

    Attributes:
        stream: Whose tokens. Text after the tokens that count is padding, and is left out.
        dim: The dimension of the tokens.
        ndim: Number of dimensions that a tensor must have to be cut; None: any.
        grid: Whether the tokens are along three dimensions, (t, h, w) from `dim` on: a rank keeps (its share, 1, 1).
        after_text: Whether whole text, which stays as it is, precedes the video along `dim`.
    """

    stream: Stream
    dim: int
    ndim: int | None = None
    grid: bool = False
    after_text: bool = False


@dataclass(frozen=True)
class Cuts:
    """All cuts of a transformer, like diffusers' `_cp_plan`: modules by path, with "*" for each element of a list and
    "-1" for the last.

    Attributes:
        inputs: Arguments of each module by name; "" is the transformer itself.
        outputs: Outputs of each module by index.
        gathered: The output of each module that holds a rank's share, and is made whole again.
    """

    inputs: Mapping[str, Mapping[str, Cut]] = field(default_factory=dict)
    outputs: Mapping[str, Mapping[int, Cut]] = field(default_factory=dict)
    gathered: Mapping[str, Cut] = field(default_factory=dict)

    def of(self, transformer: nn.Module) -> Cuts:
        """Returns these cuts, for every transformer of the class."""
        return self


@dataclass(frozen=True)
class DerivedCuts:
    """Cuts read from the `_cp_plan` of diffusers' class, which says all but whose tokens a tensor holds.

    Attributes:
        streams: Exceptions to `stream`, by the argument's name, or by "module.index" of an output; None: not cut.
        stream: The stream of every other tensor.
        more: Cuts that the plan lacks.
    """

    streams: Mapping[str, Stream | None] = field(default_factory=dict)
    stream: Stream = "video"
    more: Cuts = field(default_factory=Cuts)

    def of(self, transformer: nn.Module) -> Cuts:
        """Reads the cuts of a transformer. Raises UserError if this version of diffusers has no plan of it."""
        plan: Mapping[str, Any] | None = getattr(transformer, "_cp_plan", None)
        if not plan:
            raise UserError(
                f"this version of diffusers has no _cp_plan of {type(transformer).__name__}; install the one that "
                "db-SP is tested with (constraints.txt)"
            )
        inputs = {path: dict(cuts) for path, cuts in self.more.inputs.items()}
        outputs = {path: dict(cuts) for path, cuts in self.more.outputs.items()}
        gathered = dict(self.more.gathered)
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
"""The output that most transformers gather."""


def modules_at(root: nn.Module, path: str) -> list[nn.Module]:
    """The modules that a path names: "" is the root, "*" each element of a list, "-1" the last one."""
    found = [root]
    for part in filter(None, path.split(".")):
        found = [child for one in found for child in _children(one, part)]
    return found


def _children(module: nn.Module, part: str) -> Iterable[nn.Module]:
    if part in ("*", "-1"):
        children = list(module.children())
        return children if part == "*" else children[-1:]
    return (module.get_submodule(part),)
