"""The last stage: a pipeline folder in half precision, with its card."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dbsp_core.utils.files import TEMPORARY
from dbsp_kernels.errors import page
from scripts.training.world import COLOURS, FLOORS, FRAMES, HEIGHT, MOTIONS, SHAPES, WIDTH, captions


@dataclass(frozen=True)
class Card:
    """What the model card states. minutes: processor seconds of a stage over two cores, in minutes."""

    command: str
    seed: int
    videos: int
    autoencoder_steps: int
    transformer_steps: str
    autoencoder_losses: list[float]
    transformer_losses: list[float]
    minutes: dict[str, float]

    def text(self, parameters: dict[str, int]) -> str:
        sizes = ", ".join(f"{name} {count / 1e6:.2f} M" for name, count in parameters.items())
        spent = ", ".join(f"{name} {minutes:.1f}" for name, minutes in self.minutes.items())
        return f"""# A small trained Wan2.1

A text-to-video pipeline of Wan2.1's architecture (diffusers' `WanPipeline`: `WanTransformer3DModel` with 12 heads,
`AutoencoderKLWan`, UMT5), trained from scratch on videos that are drawn by code. It exists so that db-SP can be
shown and tested on learned attention without a download. It is no general video model: it knows one small world.

- **Made by** `{self.command}` (seed {self.seed}); licence Apache-2.0, as db-SP's.
- **Parameters**: {sizes}; stored in float16, to be used in float32.
- **Data**: {self.videos} videos of {WIDTH}×{HEIGHT} pixels, {FRAMES} frames at 16 a second (1,215 video tokens). One
  shape ({", ".join(SHAPES)}; {", ".join(COLOURS)}) that {", ".join(MOTIONS)}, over a floor ({", ".join(FLOORS)};
  another of the four colours). {len(captions())} captions: "a red ball bounces over a blue checkered floor".
- **Text encoder**: random and frozen. Its tokenizer knows the world's words alone; all others are one unknown word.
- **Training**: autoencoder {self.autoencoder_steps} steps, then the transformer {self.transformer_steps} by flow
  matching with shift 3, a tenth of the videos without a caption, moving average of the weights.
- **Cost**: {sum(self.minutes.values()):.0f} minutes on two CPU cores (measured processor time of all threads over two:
  {spent}).
- **Limits**: see "What its videos look like" in {page("trained-model")}.

`loss.csv` has the loss of every step.

Generate with {FRAMES} frames of {WIDTH}×{HEIGHT}, flow shift 3, guidance about 3, an empty negative prompt.
"""


def save_pipeline(
    tokenizer: Any, text_encoder: Any, vae: Any, transformer: Any, card: Card, folder: Path
) -> dict[str, int]:
    """Writes the folder again: weights in float16, README.md, loss.csv. Returns parameters by component."""
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
        (new / "README.md").write_text(card.text(parameters), encoding="utf-8")
        (new / "loss.csv").write_text(_every_loss(card), encoding="utf-8")
        if folder.exists():
            shutil.move(folder, Path(temporary) / "old")
        shutil.move(new, folder)
    return parameters


def _every_loss(card: Card) -> str:
    rows = ["stage,step,loss"]
    for stage, losses in (("autoencoder", card.autoencoder_losses), ("transformer", card.transformer_losses)):
        rows += [f"{stage},{step},{loss:.4f}" for step, loss in enumerate(losses)]
    return "\n".join(rows) + "\n"
