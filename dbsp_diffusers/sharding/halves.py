"""The two halves of the ranks in guidance parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dbsp_core.comm.consistency import check_consistent
from dbsp_core.comm.groups import SequenceGroup
from dbsp_core.utils.errors import UserError
from dbsp_diffusers.devices import require_own_gpus, use_model_device
from dbsp_diffusers.models import architecture_of
from dbsp_diffusers.models.transformers import transformers_of

GUIDANCE_DIFFERS = "guidance differs on rank(s) {}; give all ranks the same"


@dataclass(frozen=True)
class Halves:
    """The two halves of the ranks that make one video."""

    ranks: SequenceGroup  # All ranks
    half: SequenceGroup  # This rank's half

    @classmethod
    def of(cls, guidance: object, model: Any, ranks: SequenceGroup) -> Halves:
        """Returns the halves of the ranks that run a pipeline or transformer. Collective.

        Args:
            guidance: What the user gave, which must be True.

        Raises:
            UserError: On all ranks, for an odd number of them or a model that runs guidance in another way.
        """
        problem: Exception | None = None
        device = (-1, 0)
        try:
            _require_halves(guidance, model, ranks.size)
            device = use_model_device(transformers_of(model).values(), ranks)  # on which a half's communicator is made
        except Exception as error:  # any error: this rank must not stop alone
            problem = error
        numbers = check_consistent(ranks.control(), problem, {GUIDANCE_DIFFERS: 1}, numbers=device)
        require_own_gpus(ranks, numbers)
        size = ranks.size // 2
        return cls(ranks, ranks.part(size * (ranks.rank // size), size))

    @property
    def second(self) -> bool:
        """True if this rank is in the second half."""
        return self.ranks.rank >= self.half.size

    def exchange(self, mine: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the tensors of the first and the second half, of one shape and dtype. Collective.

        Each rank exchanges its tensor with one rank of the other half.
        """
        splits = [0] * self.ranks.size
        splits[(self.ranks.rank + self.half.size) % self.ranks.size] = mine.numel()
        other = self.ranks.all_to_all(mine.reshape(-1), splits, splits).view(mine.shape)
        return (other, mine) if self.second else (mine, other)


def _require_halves(guidance: object, model: Any, size: int) -> None:
    """Raises UserError unless two halves of `size` ranks can share a model's CFG passes."""
    if guidance is not True:
        raise UserError(f"guidance must be True or False, got {guidance!r}")
    if size % 2:
        raise UserError(f"guidance=True halves the ranks, and there are {size}; use an even number of ranks")
    for transformer in transformers_of(model).values():
        if architecture_of(transformer).guidance is None:
            raise UserError(
                f"guidance=True: db-SP does not know how pipelines run the two CFG passes of "
                f"{type(transformer).__name__}; leave guidance out"
            )
