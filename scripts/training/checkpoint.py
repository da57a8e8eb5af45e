"""The last stage: a pipeline folder in half precision."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

from dbsp_core.utils.files import TEMPORARY


def save_pipeline(
    tokenizer: Any, text_encoder: Any, vae: Any, transformer: Any, losses: dict[str, list[float]], folder: Path
) -> dict[str, int]:
    """Writes the folder again: weights in float16, and each stage's losses. Returns parameters by component."""
    from diffusers import UniPCMultistepScheduler, WanPipeline

    scheduler = UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, num_train_timesteps=1000, flow_shift=3.0
    )
    parts = {"transformer": transformer, "autoencoder": vae, "text encoder": text_encoder}
    parameters = {name: sum(p.numel() for p in part.parameters()) for name, part in parts.items()}
    pipeline = WanPipeline(
        tokenizer=tokenizer, text_encoder=text_encoder, vae=vae, transformer=transformer, scheduler=scheduler
    ).to(torch.float16)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=TEMPORARY) as temporary:
        new = Path(temporary) / "new"
        pipeline.save_pretrained(new)
        rows = [f"{stage},{step},{loss:.4f}" for stage in losses for step, loss in enumerate(losses[stage])]
        (new / "loss.csv").write_text("\n".join(["stage,step,loss", *rows]) + "\n", encoding="utf-8")
        if folder.exists():
            shutil.move(folder, Path(temporary) / "old")
        shutil.move(new, folder)
    return parameters
