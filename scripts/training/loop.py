"""A training loop with a progress bar, checkpoints and resume; what is learned is the caller's business.

Every random number of a step is drawn from (seed, step), so a resumed run goes on exactly as it would have gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from dbsp_core.utils.files import open_atomically

SAVE_EVERY = 50  # steps


@dataclass(frozen=True)
class History:
    """What a run of steps left behind: the loss of each, and the processor seconds of all (over all threads)."""

    losses: list[float]
    cpu_seconds: float


def train(
    name: str,
    steps: int,
    parts: Mapping[str, Any],
    step: Callable[[int], float],
    folder: Path,
    progress: Progress,
) -> History:
    """Calls step(0), …, step(steps − 1), from where `folder`/NAME.pt left off, and keeps that file up to date.

    parts: what has a state_dict and belongs in the checkpoint (model, optimizer, averages). step: returns its loss.
    """
    checkpoint = folder / f"{name}.pt"
    losses, spent = _restore(checkpoint, parts)
    begun = time.process_time()
    task = progress.add_task(name, total=steps, completed=len(losses))
    while len(losses) < steps:
        losses.append(step(len(losses)))
        recent = losses[-50:]
        progress.update(task, completed=len(losses), description=f"{name}, loss {sum(recent) / len(recent):.4f}")
        if len(losses) % SAVE_EVERY == 0 or len(losses) == steps:
            history = History(losses, spent + time.process_time() - begun)
            _save(checkpoint, parts, history)
    return History(losses, spent + time.process_time() - begun)


def generator_of(seed: int, step: int) -> torch.Generator:
    """The random numbers of one step."""
    return torch.Generator().manual_seed(seed * 1_000_003 + step)


def cosine(step: int, steps: int, warmup: int) -> float:
    """Learning rate as a share of the highest: up in `warmup` steps, then down along half a cosine to 0."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 + 0.5 * float(torch.cos(torch.tensor(torch.pi * (step - warmup) / max(steps - warmup, 1))))


def _save(path: Path, parts: Mapping[str, Any], history: History) -> None:
    state = {name: part.state_dict() for name, part in parts.items()}
    content = {"parts": state, "losses": history.losses, "cpu_seconds": history.cpu_seconds}
    with open_atomically(path) as file:
        torch.save(content, file)


def _restore(path: Path, parts: Mapping[str, Any]) -> tuple[list[float], float]:
    if not path.is_file():
        return [], 0.0
    content = torch.load(path, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(content["parts"][name])
    return content["losses"], content["cpu_seconds"]
