"""What must be true of a transformer before db-SP replaces its self-attention."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from dbsp_core.utils.errors import UserError

__all__ = ["check_not_compiled", "check_not_parallelized"]


def check_not_compiled(transformer: nn.Module) -> None:
    """Raises UserError for what torch.compile returned: its hooks would not be reached."""
    if hasattr(transformer, "_orig_mod"):
        raise UserError("this transformer is compiled already; parallelize first, then call torch.compile")


def check_not_parallelized(transformer: nn.Module, self_attentions: Sequence[nn.Module]) -> None:
    """Raises UserError, naming the fix, where it is sharded already."""
    if getattr(transformer, "_is_parallelized", False):
        raise UserError(
            "this transformer is parallelized already; undo that first (dbsp_diffusers.disable, "
            "dbsp_para.unparallelize, dbsp_xdit.detach), or load it again where para-attn did it, which cannot undo it"
        )
    processors = [getattr(attention, "processor", None) for attention in self_attentions]
    if any(getattr(part, "_parallel_config", None) is not None for part in (transformer, *processors)):
        raise UserError("this transformer is parallelized by diffusers (enable_parallelism); load it without that")
