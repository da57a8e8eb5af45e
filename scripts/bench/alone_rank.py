"""One rank of several without the others, on one GPU or none."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dbsp_core import SequenceGroup
from dbsp_core.comm.groups import PendingTransfer


class AloneRank(SequenceGroup):
    """A rank whose exchanges are answered at once: what it receives has the right size, and no meaning."""

    def start_all_to_all(
        self, sent: torch.Tensor, receive_splits: Sequence[int], send_splits: Sequence[int]
    ) -> PendingTransfer:
        return PendingTransfer(sent.new_zeros(sum(receive_splits), *sent.shape[1:]), sent, ())

    def all_gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        return [mine] * self.size

    def all_gather_along(self, mine: torch.Tensor) -> torch.Tensor:
        return torch.cat([mine] * self.size)
