"""Keys of known score and zero value, which rows attend to besides the keys that they are sent."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dbsp_kernels import PartialAttention
from dbsp_kernels.exchange import rotated


@dataclass(frozen=True, eq=False, repr=False)
class AbsentKeys:
    """The absent keys of one rank's rows under a mask; see `BlockMask.absent`."""

    score: torch.Tensor  # float32[Rq], natural log of the sum of exp(score)
    head: torch.Tensor  # int64[Rq], each row's

    def added_to(
        self, result: PartialAttention, rows: torch.Tensor, batch: int, scale: float, mean: torch.Tensor | None
    ) -> PartialAttention:
        """Returns the result over all keys that were sent, with these: out · e^L / (e^L + e^a), log(e^L + e^a).

        Args:
            result: out [B·Rq, Bq, D], which is written to, and L, its log-sum-exp [B·Rq, Bq].
            rows: Queries [B·Rq, Bq, D], rotated if there is a mean.
            mean: float32[B, H, D] that was subtracted from the keys that were sent, or None. These were not less.
        """
        out, lse = result
        if mean is not None:
            of_rows = rotated(mean.to(lse.dtype)).index_select(1, self.head).flatten(0, 1)  # [B, H, D] → [B·Rq, D]
            lse = lse + (rows.to(lse.dtype) * of_rows[:, None]).sum(-1) * scale
        # A row without absent keys has −inf: as a finite number it leaves one without any keys at zeros, not at NaN.
        absent = self.score.repeat(batch)[:, None].clamp(min=torch.finfo(torch.float32).min)
        return out.mul_(torch.sigmoid(lse - absent)[..., None]), torch.logaddexp(lse, absent)
