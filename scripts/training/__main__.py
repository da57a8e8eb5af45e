"""Trains a small Wan2.1 on drawn videos, in at most an hour on two CPU cores. See scripts/training/README.md.

Stopped at any time, it goes on from its last checkpoint when it is started again with the same options.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import UniPCMultistepScheduler, WanPipeline
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dbsp_core.utils.files import TEMPORARY
from scripts.training.autoencoder import Clips, encode_videos, make_autoencoder, standardise, train_autoencoder
from scripts.training.flow import Phase, Videos, make_transformer, train_transformer
from scripts.training.text import embed, make_text_encoder, make_tokenizer
from scripts.training.world import Scene

CAPTION = 16  # tokens: the longest caption, its end, and padding


@dataclass(frozen=True)
class Recipe:
    """All that the result depends on, in addition to the seed."""

    autoencoder_width: int = 16
    autoencoder_rate: float = 6e-3
    crops: tuple[Clips, ...] = (Clips(1600, 2, 9, 64, 64), Clips(400, 1, 9, 144, 240))
    longer: tuple[Clips, ...] = (Clips(600, 1, 33, 64, 80),)  # afterwards: colours must last for a whole video
    videos: int = 800
    head_width: int = 24
    layers: int = 4
    rate: float = 2e-3
    phases: tuple[Phase, ...] = (Phase(600, 16, 1), Phase(200, 6, 3), Phase(2400, 2, 9))

    @classmethod
    def toy(cls) -> Recipe:
        """Seconds, for tests: it learns nothing."""
        crops, longer = (Clips(2, 1, 5, 16, 16),), (Clips(1, 1, 9, 16, 16),)
        return cls(2, 1e-3, crops, longer, 2, 8, 1, phases=(Phase(2, 2, 2), Phase(2, 1, 3)))


def run(recipe: Recipe, seed: int, work: Path, weights: Path, progress: Progress) -> dict[str, int]:
    """Trains, or goes on, with checkpoints in `work`; writes the pipeline. Returns parameters by component."""
    work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    vae = make_autoencoder(recipe.autoencoder_width)
    rate = recipe.autoencoder_rate
    first = train_autoencoder(vae, "autoencoder", recipe.crops, rate, seed, work, progress)
    second = train_autoencoder(vae, "autoencoder-longer", recipe.longer, rate / 3, seed + 4, work, progress)

    # Seeds apart, so that the transformer's videos are not the autoencoder's.
    latents = standardise(vae, encode_videos(vae, recipe.videos, seed + 1, work, progress))

    torch.manual_seed(seed + 2)
    tokenizer = make_tokenizer()
    text_encoder = make_text_encoder(len(tokenizer))
    captions = [Scene.draw(seed + 1, index).caption for index in range(recipe.videos)]
    text = embed(tokenizer, text_encoder, captions, CAPTION)
    videos = Videos(latents, text, embed(tokenizer, text_encoder, [""], CAPTION)[0])

    torch.manual_seed(seed + 3)
    transformer = make_transformer(recipe.head_width, recipe.layers, text.shape[2])
    average, learned = train_transformer(
        transformer, videos, list(recipe.phases), recipe.rate, seed + 3, work, progress
    )
    losses = {"autoencoder": first + second, "transformer": learned}
    return save_pipeline(tokenizer, text_encoder, vae, average, losses, weights)


def save_pipeline(
    tokenizer: Any, text_encoder: Any, vae: Any, transformer: Any, losses: dict[str, list[float]], folder: Path
) -> dict[str, int]:
    """Writes the folder again: weights in float16, and each stage's losses. Returns parameters by component."""
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


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="scripts/train_tiny", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    root = Path(__file__).resolve().parents[2]
    parser.add_argument("--seed", type=int, default=0, help="of the worlds and the weights")
    parser.add_argument("--work", type=Path, default=root / "out" / "train-tiny", help="folder for the checkpoints")
    parser.add_argument("--weights", type=Path, default=root / "out" / "tiny-wan", help="folder for the pipeline")
    parser.add_argument("--threads", type=int, default=2, help="of the CPU")
    parser.add_argument("--toy", action="store_true", help="a few steps of a smaller model: learns nothing")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.filterwarnings("ignore", message="Mismatch dtype between input and weight")
    recipe = Recipe.toy() if options.toy else Recipe()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    console = Console(stderr=True)
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        sizes = run(recipe, options.seed, options.work, options.weights, progress)
    print(f"wrote {options.weights}: " + ", ".join(f"{name} {count / 1e6:.2f} M" for name, count in sizes.items()))


if __name__ == "__main__":
    main()
