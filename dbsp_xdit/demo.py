"""The demonstration: a video through xfuser's own `xdit … --sp-backend dbsp`, checked against one process.

Run by scripts/demo, or `python -m dbsp_xdit.demo --out DIR --ranks N`.
"""

from __future__ import annotations

import shutil
import socket
import sys
import sysconfig
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from safetensors.torch import load_file

from dbsp_core.config import DbspConfig
from dbsp_core.files import write_atomically
from dbsp_core.generation.launching import Watcher, run_watched
from dbsp_core.mask_file import save_mask
from dbsp_core.reports.html import report_page
from dbsp_core.reports.report import RunReport
from dbsp_core.reports.tables import layer_table
from dbsp_core.single import attach_single_process
from dbsp_core.sources import MaskRequest
from dbsp_core.strategy import Strategy
from dbsp_core.tiny import hush_libraries, make_tiny

__all__ = ["TOLERANCE", "Settings", "run_demo"]

TOLERANCE = 1e-5  # of the final latents, fp32, against one process


@dataclass(frozen=True)
class Settings:
    """What is generated. 7·13·9 = 819 tokens: no number of ranks above 3 divides them, so padding is at work too."""

    prompt: str = "a red ball bounces over a blue floor"
    height: int = 112
    width: int = 208
    num_frames: int = 33
    steps: int = 8
    guidance_scale: float = 3.5
    flow_shift: float = 3.0
    seed: int = 42
    mask: Any = None  # a mask source's settings; None for synthetic masks

    def config(self) -> dict[str, Any]:
        """db-SP's settings, as they would stand in a YAML file."""
        mask = self.mask or {"source": "synthetic", "density": 0.4, "block_q": 32, "block_k": 32}
        return {"mask": mask, "dtype": "float32", "debug": True}


def run_demo(out: Path, ranks: int, progress: Progress, settings: Settings | None = None) -> RunReport:
    """Generates a video on `ranks` processes and leaves demo.mp4, balance.png, report.html, report.json and
    masks.safetensors in `out`, each whole or not at all. returns: the report.

    Raises RuntimeError when the run fails or its latents differ from one process by more than TOLERANCE.
    """
    settings = settings or Settings()
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out, prefix=".run.") as temporary:
        work = Path(temporary)
        task = progress.add_task("making a tiny Wan2.1 checkpoint (random weights)", total=1)
        hush_libraries()
        model = make_tiny("wan", work / "tiny-wan")
        (work / "dbsp.yaml").write_text(yaml.safe_dump(settings.config()))
        progress.advance(task)

        task = progress.add_task(f"xdit --sp-backend dbsp on {ranks} ranks", total=settings.steps)
        command = _xdit_command(model, work, ranks, settings)
        _run(command, out / "xdit.log", work, progress, task)

        task = progress.add_task("the same in one process, for comparison", total=1)
        expected = single_process_latents(model, settings, "cuda" if torch.cuda.device_count() >= 2 else "cpu")
        progress.advance(task)

        latents = load_file(work / "report" / "latents.safetensors")["latents"]
        difference = float((latents - expected).abs().max())
        report = replace(RunReport.read(work / "report" / "report.json"), model="tiny-wan", max_abs_diff=difference)
        if not difference <= TOLERANCE:
            raise RuntimeError(f"the latents differ from one process by {difference:.1e}, more than {TOLERANCE:.0e}")
        _save_masks(settings, len(report.layers), out / "masks.safetensors")
        (video,) = work.glob("*.mp4")
        video.replace(out / "demo.mp4")
        (work / "report" / "balance.png").replace(out / "balance.png")
        write_atomically(out / "report.html", report_page(report))
        report.write(out / "report.json")
    return report


def _xdit_command(model: Path, work: Path, ranks: int, settings: Settings) -> list[str]:
    choices = Strategy.all_for(ranks)
    strategy = choices[len(choices) // 2]  # a true hybrid where there is one
    xdit = shutil.which("xdit", path=sysconfig.get_path("scripts"))
    if xdit is None:
        raise RuntimeError("the xdit command is not installed beside this Python; pip install 'dbsp-attention[xdit]'")
    options = {
        "--model": model,
        "--ulysses_degree": strategy.ulysses,
        "--ring_degree": strategy.ring,
        "--sp-backend": "dbsp",
        "--sp-config": work / "dbsp.yaml",
        "--sp-report": work / "report",
        "--prompt": settings.prompt,
        "--negative_prompt": "",
        "--height": settings.height,
        "--width": settings.width,
        "--num_frames": settings.num_frames,
        "--num_inference_steps": settings.steps,
        "--guidance_scale": settings.guidance_scale,
        "--flow_shift": settings.flow_shift,
        "--seed": settings.seed,
        "--output_directory": work,
        "--master_port": _free_port(),
    }
    return [xdit, *(str(part) for option in options.items() for part in option)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run(command: list[str], log: Path, work: Path, progress: Progress, task: Any) -> None:
    """Runs a command that starts ranks, its output to `log`, its denoising steps to the progress bar."""
    environment = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    if torch.cuda.device_count() < 2:  # a single GPU cannot serve several ranks
        environment["CUDA_VISIBLE_DEVICES"] = ""
    steps = int(progress.tasks[task].total or 0)
    watcher = Watcher(steps, stepped=lambda done: progress.update(task, completed=done))
    run_watched(command, log, work / "ranks", watcher, environment)


def single_process_latents(model: Path, settings: Settings, device: str) -> torch.Tensor:
    """Final latents, float32[1, C, F, H, W], of stock diffusers with the same masks, without any parallelism."""
    from diffusers import WanPipeline

    pipe = WanPipeline.from_pretrained(model, torch_dtype=torch.float32, local_files_only=True).to(device)
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler.config.flow_shift = settings.flow_shift  # as xfuser's runner sets it
    attach_single_process(pipe.transformer, settings.config())
    output = pipe(
        prompt=settings.prompt,
        negative_prompt="",
        height=settings.height,
        width=settings.width,
        num_frames=settings.num_frames,
        num_inference_steps=settings.steps,
        guidance_scale=settings.guidance_scale,
        generator=torch.Generator(device).manual_seed(settings.seed),
        output_type="latent",
    )
    latents: torch.Tensor = output.frames.float().cpu()
    return latents


def _save_masks(settings: Settings, layers: int, path: Path) -> None:
    source = DbspConfig.load(settings.config()).mask
    thw = ((settings.num_frames - 1) // 4 + 1, settings.height // 16, settings.width // 16)
    save_mask(path, [source.mask(MaskRequest(layer, 12, thw)) for layer in range(layers)])


def main(
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("out"),
    ranks: Annotated[
        int, typer.Option(help="Processes; default: one per GPU where there are two or more, else 4.")
    ] = 0,
) -> None:
    """Generate a video with db-SP in xDiT, and show what it did."""
    gpus = torch.cuda.device_count()
    ranks = ranks or (min(gpus, 8) if gpus >= 2 else 4)
    console = Console()
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console) as progress:
            report = run_demo(out.resolve(), ranks, progress)
    except (RuntimeError, ValueError) as error:
        console.print(str(error), markup=False, highlight=False)
        raise SystemExit(1) from error
    console.print(layer_table(report))
    console.print(f"wrote {out}/demo.mp4, {out}/balance.png, {out}/report.html and {out}/report.json", highlight=False)
    dbsp = Path(sys.executable).with_name("dbsp")
    console.print(f"next: {dbsp} plan {out}/masks.safetensors --gpus 8 --planner all", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
