"""Absent keys: keys of known score and zero value that rows attend to without exchanging them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dbsp_kernels import PartialAttention
from dbsp_kernels.exchange import rotated


@dataclass(frozen=True, eq=False, repr=False)
class AbsentKeys:
    """The absent keys of one rank's rows under a mask; see `BlockMask.absent`."""

    score: torch.Tensor  # float32[Rq], natural log of the sum of exp(score)
    head: torch.Tensor  # int64[Rq], head of each row

    def added_to(
        self, result: PartialAttention, rows: torch.Tensor, batch: int, scale: float, mean: torch.Tensor | None
    ) -> PartialAttention:
        """Adds the absent keys to a result: out · e^L / (e^L + e^a), log(e^L + e^a).

        Args:
            result: out [B·Rq, Bq, D], overwritten, and its log-sum-exp L [B·Rq, Bq].
            rows: Queries [B·Rq, Bq, D], rotated if there is a mean.
            mean: float32[B, H, D] subtracted from the sent keys (but not from absent keys), or None.
        """
        out, lse = result
        if mean is not None:
            of_rows = rotated(mean.to(lse.dtype)).index_select(1, self.head).flatten(0, 1)  # [B, H, D] → [B·Rq, D]
            lse = lse + (rows.to(lse.dtype) * of_rows[:, None]).sum(-1) * scale
        # Clamp −inf (no absent keys), so that rows without any keys give 0 instead of NaN.
        absent = self.score.repeat(batch)[:, None].clamp(min=torch.finfo(torch.float32).min)
        return out.mul_(torch.sigmoid(lse - absent)[..., None]), torch.logaddexp(lse, absent)
