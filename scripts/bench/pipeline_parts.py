"""What of a pipeline's call is not denoising, and what sharing it out would save.

python -m scripts.bench.pipeline_parts                   the small trained model, and Wan2.1-14B on 8 GPUs
python -m scripts.bench.pipeline_parts --out FILE        and the rows as CSV

measured: processor seconds of the parts of one call of the small trained pipeline, in one process on one core
modelled: seconds of Wan2.1-14B at 720p, guidance in 50 steps, on 8 GPUs of --hardware, by the latency model; the text
          encoder by its parameters (two FLOP each a token, 512 tokens, two prompts)
counted:  bytes that the text encoder's weights take on every GPU
"""

from __future__ import annotations

import argparse
import csv
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dbsp_cli.commands.simulate import masks_for
from dbsp_cli.placement import predict_placements
from dbsp_cli.tiny_models import TRAINED_WAN
from dbsp_core.cost.hardware import load_hardware
from dbsp_core.models.table import MODEL_SPECS

MODEL, GPUS = "wan2.1-t2v-14b", 8
TEXT_PARAMETERS, TEXT_TOKENS, PROMPTS = 5_680_910_336, 512, 2


@dataclass(frozen=True)
class Row:
    """One part of a call. unit: s, or GB"""

    model: str
    part: str
    amount: float
    unit: str
    share: float | None
    label: str


class Clock:
    """Processor seconds of this process within the methods that it is put around."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def around(self, owner: Any, method: str, part: str) -> Iterator[None]:
        original: Callable[..., Any] = getattr(owner, method)

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return original(*args, **kwargs)
            finally:
                self.seconds[part] = self.seconds.get(part, 0.0) + time.process_time() - start

        setattr(owner, method, timed)
        try:
            yield
        finally:
            delattr(owner, method)


def small_model(steps: int) -> list[Row]:
    """Of the small trained pipeline, at its usual size."""
    from diffusers import WanPipeline

    torch.set_num_threads(1)
    pipe = WanPipeline.from_pretrained(TRAINED_WAN, torch_dtype=torch.float32, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    clock = Clock()
    with (
        clock.around(pipe, "encode_prompt", "text encoder"),
        clock.around(pipe.transformer, "forward", "transformer"),
        clock.around(pipe.scheduler, "step", "scheduler"),
        clock.around(pipe.vae, "decode", "decoding"),
        clock.around(pipe.video_processor, "postprocess_video", "postprocessing"),
    ):
        start = time.process_time()
        pipe("a red ball", height=144, width=240, num_frames=33, num_inference_steps=steps)
        whole = time.process_time() - start
    parts = clock.seconds | {"all else": whole - sum(clock.seconds.values())}
    label = f"measured, {steps} steps, processor seconds"
    return [Row("tiny-wan-trained", part, round(s, 4), "s", round(s / whole, 4), label) for part, s in parts.items()]


def large_model(hardware: str) -> list[Row]:
    """Of Wan2.1-14B with dual-balanced attention: parts of the fastest placement on one node, guidance in turn."""
    spec, machine = MODEL_SPECS[MODEL], load_hardware(hardware)
    found = predict_placements(spec, masks_for(spec, None, 1, 2), machine, GPUS, memory_limit=1 << 60)
    best = next(one for one in found if one.placement.guidance == 1 and one.placement.vae)
    each = next(one for one in found if one.placement.strategy == best.placement.strategy and not one.placement.vae)
    text = 2.0 * TEXT_PARAMETERS * TEXT_TOKENS * PROMPTS / machine.constants.linear_flops_per_s
    parts = {
        "attention, shared": best.attention_s,
        "linear layers, shared": best.linear_s,
        "decoding, on each GPU": each.decode_s,
        "text encoder, on each GPU": text,
        "what else one device does alone, fitted": best.serial_s,
    }
    whole = sum(parts.values())
    label = f"modelled, {best.placement.strategy} on {hardware}"
    rows = [Row(spec.name, part, round(s, 3), "s", round(s / whole, 4), label) for part, s in parts.items()]
    rows.append(Row(spec.name, "decoding, shared", round(best.decode_s, 3), "s", None, label))
    return [*rows, Row(spec.name, "text encoder's weights, bfloat16", TEXT_PARAMETERS * 2e-9, "GB", None, "counted")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--hardware", nargs="+", default=["h800", "a800"])
    parser.add_argument("--out", type=Path, help="CSV file to write")
    args = parser.parse_args()
    rows = small_model(args.steps) + [row for name in args.hardware for row in large_model(name)]
    if args.out is not None:
        with args.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(asdict(rows[0])), lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
    table = Table(*asdict(rows[0]))
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in asdict(row).values()))
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
