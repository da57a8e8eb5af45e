"""A training loop with a progress bar, checkpoints and resume; what is learned is the caller's business.

Every random number of a step is drawn from (seed, step), so a resumed run goes on exactly as it would have gone.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from dbsp_core.utils.files import write_atomically

SAVE_EVERY = 50  # steps


def train(
    name: str,
    steps: int,
    parts: Mapping[str, Any],
    step: Callable[[int], float],
    folder: Path,
    progress: Progress,
) -> list[float]:
    """Calls step(0), …, step(steps − 1), from where `folder`/NAME.pt left off, and keeps that file up to date.

    parts: what has a state_dict and belongs in the checkpoint (model, optimizer, averages). step: returns its loss.
    Returns the loss of each step.
    """
    checkpoint = folder / f"{name}.pt"
    losses = _restore(checkpoint, parts)
    task = progress.add_task(name, total=steps, completed=len(losses))
    while len(losses) < steps:
        losses.append(step(len(losses)))
        recent = losses[-50:]
        progress.update(task, completed=len(losses), description=f"{name}, loss {sum(recent) / len(recent):.4f}")
        if len(losses) % SAVE_EVERY == 0 or len(losses) == steps:
            state = {part_name: part.state_dict() for part_name, part in parts.items()}
            content = io.BytesIO()
            torch.save({"parts": state, "losses": losses}, content)
            write_atomically(checkpoint, content.getvalue())
    return losses


def generator_of(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + step)


def cosine(step: int, steps: int, warmup: int) -> float:
    """Learning rate as a share of the highest: up in `warmup` steps, then down along half a cosine to 0."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 + 0.5 * float(torch.cos(torch.tensor(torch.pi * (step - warmup) / max(steps - warmup, 1))))


def _restore(path: Path, parts: Mapping[str, Any]) -> list[float]:
    if not path.is_file():
        return []
    content = torch.load(path, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(content["parts"][name])
    return content["losses"]
