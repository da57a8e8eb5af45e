"""Masks with equal numbers of blocks per row, plus linear attention to all tokens (SLA)."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F

from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.branches import FeatureMap, LinearBranch, heads_at_once
from dbsp_core.sources.base import ByStep, LocalQK, MaskRequest, OrderedSource
from dbsp_core.sources.head_shares import LocalBlocks
from dbsp_core.sources.sparge import SpargeSource
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.process import log
from dbsp_core.utils.schema import require_choice

FEATURES: dict[str, FeatureMap] = {
    "softmax": functools.partial(torch.softmax, dim=-1),
    "elu": lambda tokens: F.elu(tokens) + 1,
    "relu": torch.relu,
}


@dataclass(frozen=True)
class SlaSource(OrderedSource):
    """Sparse-Linear Attention: every row keeps the key blocks of largest pooled score, plus a linear branch.

    For models trained with it, such as TurboWan. The branch is added if the model has its projection (`attn1.proj_l`).
    The mask is that of `SpargeSource` with topk, without similarity. For the branch, ranks exchange only sums over all
    tokens, float32[B, H, D, D + 1]. (Zhang et al., SLA: Beyond Sparsity in Diffusion Transformers via Fine-Tunable
    Sparse-Linear Attention, arXiv 2509.24006, 2025.)

    Attributes:
        topk: Fraction of key blocks that a row keeps, rounded down, at least one block.
        feature: Feature map of the branch: softmax over a head's channels, elu + 1, or relu.
        linear: True to add the branch, if the model has a projection for it.
    """

    block_q: int = 128
    block_k: int = 64
    topk: ByStep = 0.1
    feature: Literal["softmax", "elu", "relu"] = "softmax"
    linear: bool = True
    projection: ClassVar[str] = "proj_l"
    scheduled: ClassVar[tuple[str, ...]] = ("topk",)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("feature", self.feature, tuple(FEATURES), "mask.")
        self._choice  # noqa: B018  raises for values out of range

    @property
    def branch_layer(self) -> str | None:
        """Name of the branch's layer in a self-attention module."""
        return self.projection if self.linear else None

    @functools.cached_property
    def _choice(self) -> SpargeSource:
        return SpargeSource(
            self.block_q,
            self.block_k,
            topk=self.topk,
            similarity=-1.0,
            attention_sink=self.attention_sink,
            dense_text=self.dense_text,
            token_order=self.token_order,
        )

    def mask(self, request: MaskRequest, tokens: LocalQK) -> BlockMask:
        """Predicts the mask, with the linear branch if there is a projection. Collective.

        Raises UserError if the projection `tokens.gate` is not [D + 1, D].
        """
        mask, (head_dim, device) = self._choice.mask(request, tokens), (tokens.q.shape[-1], tokens.q.device)
        if not self.linear:
            return mask
        if tokens.gate is None or tokens.v is None:
            if tokens.group.rank == 0:
                _say_without_projection()
            return mask
        if tokens.gate.shape != (head_dim + 1, head_dim):
            raise UserError(
                f"the projection of a linear branch is of shape {list(tokens.gate.shape)}, expected "
                f"{[head_dim + 1, head_dim]} for heads of {head_dim} channels: outputs for zeros and for each channel"
            )
        wide = torch.promote_types(tokens.q.dtype, torch.float32)
        feature, gate = FEATURES[self.feature], tokens.gate.to(wide)
        blocks = LocalBlocks.from_layout(tokens.layout, mask.grid, tokens.group.rank, tokens.q.shape[2], device)
        sums = _local_sums(tokens.k.to(wide), tokens.v.to(wide), blocks.real, feature)
        sums = _sum_over_ranks(sums, tokens.group)
        return replace(mask, branch=LinearBranch(tokens.q, sums, gate, blocks.real, feature))


def _local_sums(k: torch.Tensor, v: torch.Tensor, real: torch.Tensor, feature: FeatureMap) -> torch.Tensor:
    """Returns Σ φ(k)ᵀ[v, 1] over a rank's tokens [B, H, D, D + 1], for k and v [B, H, n_local, D]."""
    sums, padding = k.new_empty(*k.shape[:2], k.shape[-1], v.shape[-1] + 1), ~real[:, None]
    for heads in heads_at_once(k):
        features = feature(k[:, heads]).masked_fill_(padding, 0.0)
        values = F.pad(v[:, heads].masked_fill(padding, 0.0), (0, 1), value=1.0)
        torch.matmul(features.mT, values, out=sums[:, heads])
    return sums


def _sum_over_ranks(mine: torch.Tensor, group: SequenceGroup) -> torch.Tensor:
    """Sums all ranks' tensors, each rank a part; bitwise identical on all. Collective."""
    share = -(-mine.numel() // group.size)
    parts = F.pad(mine.flatten(), (0, share * group.size - mine.numel()))
    splits = [share] * group.size
    total = group.all_to_all(parts, splits, splits).view(group.size, share).sum(0)
    return group.all_gather_along(total)[: mine.numel()].view_as(mine)


@functools.cache
def _say_without_projection() -> None:
    log.warning(
        "mask source sla: no projection (attn1.proj_l) found, so the linear branch is off; models trained with "
        "SLA need it"
    )
