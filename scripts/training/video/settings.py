"""What `scripts/train_video` is told, checked before any rank starts."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dbsp_cli.tiny_models import TRAINED_WAN
from dbsp_core.config.config import DbspConfig
from dbsp_core.utils.errors import UserError

__all__ = ["SYNTHETIC", "Settings"]

SYNTHETIC = "synthetic"


@dataclass(frozen=True)
class Settings:
    """See the options' help. batch: of all data-parallel groups together"""

    model: Path
    data: str
    config: str | None
    out: Path
    ranks: int
    sequence_parallel: int
    steps: int
    batch: int
    learning_rate: float
    warm_up: int
    lora: int
    precision: str
    checkpointing: bool
    fsdp: bool
    height: int
    width: int
    frames: int
    no_caption: float
    save_every: int
    seed: int
    mix: str = ""
    bags: str = ""
    max_tokens: int | None = None

    @classmethod
    def parse(cls, arguments: list[str] | None = None) -> Settings:
        """Raises UserError for what cannot be meant."""
        settings = cls(**vars(_parser().parse_args(arguments)))
        settings._check()
        return settings

    @property
    def data_parallel(self) -> int:
        return self.ranks // self.sequence_parallel

    @property
    def size(self) -> tuple[int, int, int]:
        """Frames, height and width of clips."""
        return self.frames, self.height, self.width

    @property
    def bag_settings(self) -> dict[str, Any] | None:
        """As `DbspConfig.bags`."""
        return {"topology": self.bags, "max_tokens": self.max_tokens} if self.bags else None

    def _check(self) -> None:
        for name in ("ranks", "sequence_parallel", "steps", "batch", "save_every"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name.replace('_', '-')} {getattr(self, name)} must be at least 1")
        if self.ranks % self.sequence_parallel:
            raise UserError(
                f"{self.ranks} ranks cannot be split into groups of --sequence-parallel {self.sequence_parallel}; "
                "choose a divisor"
            )
        if not self.mix and self.batch % self.data_parallel:
            raise UserError(
                f"--batch {self.batch} does not divide over {self.data_parallel} data-parallel groups "
                f"({self.ranks} ranks / {self.sequence_parallel}); choose a multiple"
            )
        if (self.bags or self.max_tokens is not None) and not self.mix:
            raise UserError("--bags and --max-tokens share out the sequences of a --mix; give one")
        if self.max_tokens is not None and not self.bags:
            raise UserError("--max-tokens limits what bags hold; give --bags, for example auto")
        bags = DbspConfig.load({"bags": self.bag_settings}).bags
        if bags is not None:
            bags.require_ranks(self.sequence_parallel)
        if not (self.model / "model_index.json").is_file():
            raise UserError(f"--model {self.model} is no folder of a diffusers pipeline: it has no model_index.json")
        kind = json.loads((self.model / "model_index.json").read_text(encoding="utf-8")).get("_class_name")
        if kind != "WanPipeline":
            raise UserError(f"--model {self.model} holds a {kind}; this script trains text-to-video WanPipelines")
        if self.frames % 4 != 1 or self.height % 16 or self.width % 16:
            raise UserError(
                f"clips of {self.frames} frames of {self.width}x{self.height} don't fit Wan; frames must be 4n + 1, "
                "height and width multiples of 16"
            )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="scripts/train_video",
        description="Fine-tune Wan through dual-balanced block-sparse attention: sequence parallel × data parallel. "
        "Stopped, it goes on from its last checkpoint when started again with the same --out.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--model", type=Path, default=TRAINED_WAN, help="local diffusers folder; default: the shipped tiny Wan")
    add(
        "--data",
        default=f"{SYNTHETIC}:64",
        help=f"folder of NAME.mp4 and NAME.txt (its caption), or {SYNTHETIC}:COUNT drawn clips",
    )
    add("--config", help="db-SP's YAML file: masks, strategy, layout…; default: that of the checkpoint, else dense")
    add("--out", type=Path, default=Path("out/train-video"), help="folder for data, checkpoints, losses and weights")
    add("--ranks", type=int, default=1, help="processes on this node; under torchrun its own number counts")
    add("--sequence-parallel", type=int, default=1, help="ranks that share one sequence; the rest is data parallel")
    add("--steps", type=int, default=200, help="optimiser steps in all, those before a checkpoint included")
    add("--batch", type=int, default=2, help="clips in a step, over all ranks")
    add("--learning-rate", type=float, default=1e-4, help="of AdamW")
    add("--warm-up", type=int, default=10, help="steps until the learning rate is reached")
    add("--lora", type=int, default=0, help="rank of LoRA adapters on self- and cross-attention; 0: all weights")
    add("--precision", choices=("fp32", "bf16"), default="fp32", help="bf16: autocast over float32 weights")
    add("--checkpointing", action="store_true", help="activation checkpointing: compute each block again in backward")
    add("--fsdp", action="store_true", help="shard parameters and optimiser over all ranks by FSDP2")
    add("--height", type=int, default=144)
    add("--width", type=int, default=240)
    add("--frames", type=int, default=33)
    add("--no-caption", type=float, default=0.1, help="share of clips trained without caption, for guidance")
    add("--save-every", type=int, default=50, help="steps between checkpoints; the last step always makes one")
    add("--seed", type=int, default=0)
    add(
        "--mix",
        default="",
        help="images and videos of several sizes in one step, instead of --batch: what each data loader gives, as "
        "COUNT*FRAMESxHEIGHTxWIDTH joined by +, or none; loaders are joined by commas, and shared out over the ranks",
    )
    add(
        "--bags",
        default="",
        help="groups of ranks that share the sequences of a --mix, of each of which one bag has all: g2n2 are two of "
        "two ranks; auto: those with the least modelled time; default: one of all ranks of --sequence-parallel",
    )
    add("--max-tokens", type=int, help="that a rank can hold, for --bags; default: any number")
    return parser
