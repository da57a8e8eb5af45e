"""Muon for matrices and convolutions: momentum whose singular values are all made about 1.

Jordan et al., Muon: an optimizer for hidden layers in neural networks, 2024; the step's size is matched to AdamW's as
in Liu et al., Muon is scalable for LLM training, 2025. torch's own (2.9) takes matrices alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class Muon(torch.optim.Optimizer):
    """Parameters of two and more dimensions, the first of them the outputs."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, momentum: float = 0.95):
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None):
                state = self.state[parameter]
                average = state.setdefault("average", torch.zeros_like(parameter))
                average.lerp_(parameter.grad, 1 - group["momentum"])
                update = orthogonal(torch.lerp(parameter.grad, average, group["momentum"]).flatten(1))
                size = 0.2 * max(update.shape) ** 0.5
                parameter.add_(update.view_as(parameter), alpha=-group["lr"] * size)


def orthogonal(matrix: torch.Tensor, rounds: int = 5) -> torch.Tensor:
    """About U·Vᵀ of matrix = U·S·Vᵀ, by a Newton–Schulz iteration of odd polynomials of degree 5."""
    wide = matrix.shape[0] <= matrix.shape[1]
    x = (matrix if wide else matrix.T).bfloat16()
    x = x / (x.norm() + 1e-7)
    for _ in range(rounds):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return (x if wide else x.T).float()


def optimizers_of(model: nn.Module, hidden: Iterable[nn.Parameter], rate: float) -> dict[str, torch.optim.Optimizer]:
    """Muon for `hidden`, AdamW for the model's other parameters, with learning rate `rate` for both."""
    chosen = list(hidden)
    known = {id(p) for p in chosen}
    rest = [p for p in model.parameters() if id(p) not in known]
    adamw = torch.optim.AdamW(rest, lr=rate, betas=(0.9, 0.98), weight_decay=0.0)
    return {"muon": Muon(chosen, rate), "adamw": adamw}
