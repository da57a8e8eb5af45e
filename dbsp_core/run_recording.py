"""What a run leaves behind when a report folder is set: report.json, balance.png and the final latents."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from dbsp_core.files import write_atomically
from dbsp_core.hosts import Attachment
from dbsp_core.report import RunReport, balance_picture, layer_reports
from dbsp_core.session import AttentionSession

__all__ = ["recorded"]


@contextmanager
def recorded(session: AttentionSession | None, pipe: Any, model: str, host: str) -> Iterator[None]:
    """Writes the report of the pipeline runs inside, once they succeeded, on rank 0. Without a folder, nothing.

    session: that is attached to the pipeline, if any
    """
    if session is None or session.config.report is None or session.group.rank != 0:
        yield
        return
    latents: list[torch.Tensor] = []
    attachment = _keep_latents(pipe.scheduler, latents)
    start = time.perf_counter()
    try:
        yield
    finally:
        attachment.detach()
    _write(session, model, host, time.perf_counter() - start, latents)


def _keep_latents(scheduler: Any, latents: list[torch.Tensor]) -> Attachment:
    """Keeps what the scheduler's last step returned: the latents that the VAE decodes."""
    step = scheduler.step

    def step_and_keep(*args: Any, **kwargs: Any) -> Any:
        output = step(*args, **kwargs)
        latents[:] = [output[0]]
        return output

    attachment = Attachment()
    attachment.set_attribute(scheduler, "step", step_and_keep)
    return attachment


def _write(session: AttentionSession, model: str, host: str, seconds: float, latents: list[torch.Tensor]) -> None:
    folder = Path(session.config.report or ".")
    write_atomically(folder / "balance.png", balance_picture(session.records))
    if latents:
        write_atomically(folder / "latents.safetensors", save({"latents": latents[0].float().cpu().contiguous()}))
    RunReport(
        model=model,
        host=host,
        world_size=session.group.size,
        strategy=session.strategy_in_words,
        planner=session.config.planner,
        max_abs_diff=None,
        layers=layer_reports(session.records),
        seconds=seconds,
    ).write(folder / "report.json")
