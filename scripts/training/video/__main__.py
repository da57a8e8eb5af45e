"""Fine-tunes Wan through dual-balanced block-sparse attention. See docs/training.md; started by scripts/train_video.

Alone it encodes the data, then starts --ranks processes of itself under torchrun; under torchrun it is one of them.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch.distributed.device_mesh import init_device_mesh

from dbsp_core.comm.devices import use_local_device
from dbsp_core.comm.rank_program import exit_on_failure, process_group
from dbsp_core.utils.errors import UserError
from scripts.training.video.clips import Clips, encode_clips
from scripts.training.video.fine_tuning import FineTuning
from scripts.training.video.settings import Settings

COLUMNS = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
OTHER_SHIFT = 3.0


def train(settings: Settings) -> None:
    """One rank's whole run."""
    device = use_local_device()
    with process_group(device):
        shape = (settings.data_parallel, settings.sequence_parallel)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "sequence"))
        folder: list[Path | None] = [encode_clips(settings) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(folder, src=0)
        assert folder[0] is not None
        clips = Clips.read(folder[0], settings.no_caption, settings.seed, _shift(settings.model))
        training = FineTuning.prepare(settings, mesh, clips, device)
        _run(training, settings)


def _run(training: FineTuning, settings: Settings) -> None:
    first = dist.get_rank() == 0
    console = Console(stderr=True)
    with Progress(*COLUMNS, TimeRemainingColumn(), console=console, disable=not first) as progress:
        task = progress.add_task("training", total=settings.steps, completed=len(training.losses))
        while len(training.losses) < settings.steps:
            loss = training.step()
            rho = training.session.statistics()["mean_rho"]
            done = len(training.losses)
            progress.update(task, completed=done, description=f"loss {loss:.4f}, ρ_s {rho:.3f}")
            if done % settings.save_every == 0 or done == settings.steps:
                training.save()
    folder = training.save_weights()
    if first:
        print(f"wrote {folder}; losses in {settings.out / 'loss.csv'}")


def _shift(model: Path) -> float:
    scheduler = json.loads((model / "scheduler" / "scheduler_config.json").read_text(encoding="utf-8"))
    return float(scheduler.get("flow_shift") or scheduler.get("shift") or OTHER_SHIFT)


def main() -> None:
    warnings.filterwarnings("ignore", category=FutureWarning, module="diffusers")
    try:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            arguments = [*sys.argv[1:], "--ranks", os.environ["WORLD_SIZE"]]
            train(Settings.parse(arguments))
            return
        settings = Settings.parse()
        if torch.cuda.is_available() and torch.cuda.device_count() < settings.ranks:
            raise UserError(f"--ranks {settings.ranks}, but there are {torch.cuda.device_count()} GPUs")
        settings.out.mkdir(parents=True, exist_ok=True)
        encode_clips(settings)
    except (UserError, OSError) as error:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(settings.ranks)]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.execv(sys.executable, [*launch, "-m", __spec__.name, *sys.argv[1:]])


if __name__ == "__main__":
    with exit_on_failure():
        main()
