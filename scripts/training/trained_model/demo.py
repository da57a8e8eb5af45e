"""The demonstration: a video through xfuser's own `xdit … --sp-backend dbsp`, checked against one process.

Run by scripts/demo, or `python -m scripts.training.trained_model.demo --out DIR --ranks N`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
import typer
import yaml
from rich.console import Console
from safetensors.torch import load_file

from dbsp_cli.commands.report import show_run
from dbsp_cli.mask_tools.info import MaskSeries
from dbsp_cli.output import print_tables
from dbsp_cli.tiny_models import make_tiny, silence_libraries
from dbsp_core.layout.strategy import Strategy
from dbsp_core.masks.mask_file import save_mask
from dbsp_core.reports.page import report_page
from dbsp_core.reports.run_report import RunReport
from dbsp_core.utils.files import write_atomically
from dbsp_kernels.errors import install_command
from scripts.training.trained_model.side_by_side import decode_video, save_side_by_side
from tests.support.ports import free_port
from tests.support.single_process import attach_single_process

PREDICTED = {"source": "sparge", "cdf": 0.85, "similarity": -1.0, "block_q": 16, "block_k": 16}
_LOOK_S, _TAIL = 0.2, 30  # seconds between looks at a log, and lines of it that are shown
FIXED = {"source": "radial", "width": 0.5, "block_q": 16, "block_k": 16}


@dataclass(frozen=True)
class Settings:
    """Settings of the demonstration: the trained model's world. 9·9·15 = 1,215 tokens are odd: padding is at work.

    mask:      a mask source's settings
    tolerance: how far the final latents may be from one process. This model amplifies rounding: in float32 it comes to
               some 1e-5, and decides single blocks of predicted masks (docs/trained-model.md)
    """

    prompt: str = "a red ball bounces over a blue checkered floor"
    height: int = 144
    width: int = 240
    num_frames: int = 33
    steps: int = 8
    guidance_scale: float = 3.0
    flow_shift: float = 3.0
    seed: int = 6
    mask: dict[str, Any] = field(default_factory=lambda: PREDICTED)
    dtype: str = "float64"
    tolerance: float = 1e-5

    @classmethod
    def for_gpus(cls) -> Settings:
        """In float32, which the GPU kernels support, with masks that rounding cannot change."""
        return cls(mask=FIXED, dtype="float32", tolerance=1e-3)

    def config(self, **more: Any) -> dict[str, Any]:
        return {"mask": self.mask, "generate": {"dtype": self.dtype}, **more}


def run_demo(out: Path, ranks: int, console: Console, settings: Settings | None = None) -> RunReport:
    """Generates a video on `ranks` processes and leaves demo.mp4, frames.png, balance.png, report.html, report.json
    and masks.safetensors in `out`, each whole or not at all. returns: the report.

    Raises RuntimeError when the run fails or its latents differ from one process by more than the tolerance.
    """
    from diffusers import AutoencoderKLWan

    settings, start = settings or Settings(), time.monotonic()
    out.mkdir(parents=True, exist_ok=True)

    def say(what: str) -> None:
        console.print(f"{time.monotonic() - start:4.0f} s  {what}", markup=False, highlight=False)

    with tempfile.TemporaryDirectory(dir=out, prefix=".run.") as temporary:
        work = Path(temporary)
        say("making a tiny Wan2.1 checkpoint (trained weights)")
        silence_libraries()
        model = make_tiny("wan-trained", work / "tiny-wan-trained")
        config = settings.config(report=str(work / "report"))
        (work / "dbsp.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")

        say(f"xdit --sp-backend dbsp on {ranks} ranks")
        _run(_xdit_command(model, work, ranks, settings), settings.steps, out / "xdit.log", work, say)

        device = "cuda" if torch.cuda.device_count() >= 2 else "cpu"
        say("the same in one process, sparse")
        expected = single_process_latents(model, settings, device)
        say("the same in one process, dense")
        dense = single_process_latents(model, settings, device, sparse=False)

        latents = load_file(work / "report" / "latents.safetensors")["latents"]
        difference = float((latents.double() - expected.double()).abs().max())
        report = replace(
            RunReport.read(work / "report" / "report.json"), model="tiny-wan-trained", max_abs_diff=difference
        )
        if not difference <= settings.tolerance:
            allowed = f"{settings.tolerance:.0e}"
            raise RuntimeError(f"the latents differ from one process by {difference:.1e}, more than {allowed}")
        series = MaskSeries.read(work / "masks")  # of the pass with the caption
        save_mask(out / "masks.safetensors", [series.get(series.steps[-1], layer) for layer in series.layers])
        density = fmean(dict(zip(report.calls.layer, report.calls.density, strict=True)).values())  # the last calls'
        videos = {"dense attention": dense, f"block-sparse, density {density:.2f}, {ranks} ranks": latents}
        vae = AutoencoderKLWan.from_pretrained(model / "vae", torch_dtype=torch.float32, local_files_only=True)
        frames = {title: decode_video(vae, video.float()) for title, video in videos.items()}
        save_side_by_side(out / "frames.png", frames, settings.prompt)
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
        raise RuntimeError(f"the xdit command is not installed next to this Python; {install_command('xdit')}")
    options = {
        "--model": model,
        "--ulysses_degree": strategy.ulysses,
        "--ring_degree": strategy.ring,
        "--sp-backend": "dbsp",
        "--sp-config": work / "dbsp.yaml",
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
        "--master_port": free_port(),
    }
    return [xdit, *(str(part) for option in options.items() for part in option)]


def _run(command: list[str], steps: int, log: Path, work: Path, say: Callable[[str], None]) -> None:
    """Runs a command that starts ranks, its output to `log`; says its denoising steps."""
    environment = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "DBSP_DEBUG": "1",
        "DBSP_RECORD": str(work / "masks"),
        "TQDM_MININTERVAL": "0",
        "PYTHONUNBUFFERED": "1",
    }
    if torch.cuda.device_count() < 2:  # several ranks cannot share one GPU
        environment["CUDA_VISIBLE_DEVICES"] = ""
    said = 0
    with log.open("wb") as file:
        run = subprocess.Popen(command, env=os.environ | environment, stdout=file, stderr=subprocess.STDOUT)
        try:
            while run.poll() is None:
                done = re.findall(rf"(\d+)/{steps} \[", log.read_text(encoding="utf-8", errors="replace"))
                if done and int(done[-1]) > said:
                    said = int(done[-1])
                    say(f"  step {said} of {steps}")
                time.sleep(_LOOK_S)
        finally:
            run.terminate()  # an interrupt: torchrun ends its ranks
            run.wait()
    if run.returncode:
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL:]
        raise RuntimeError("\n".join([f"xdit failed (exit code {run.returncode}); the end of its output:", *tail]))


def single_process_latents(model: Path, settings: Settings, device: str, sparse: bool = True) -> torch.Tensor:
    """Final latents, [1, C, F, H, W], of stock diffusers with the same masks, or dense in float32, on one process."""
    from diffusers import WanPipeline

    dtype = getattr(torch, settings.dtype) if sparse else torch.float32
    pipe = WanPipeline.from_pretrained(model, torch_dtype=dtype, local_files_only=True).to(device)
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler.config.flow_shift = settings.flow_shift  # as xfuser's runner sets it
    if sparse:
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
    return output.frames.cpu()


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
    try:
        report = run_demo(out.resolve(), ranks, console, Settings.for_gpus() if gpus >= 2 else Settings())
    except (RuntimeError, ValueError) as error:
        console.print(str(error), markup=False, highlight=False)
        raise SystemExit(1) from error
    print_tables(show_run(report)[0])
    names = ("demo.mp4", "frames.png", "balance.png", "report.html", "report.json")
    console.print("wrote " + ", ".join(f"{out}/{name}" for name in names), highlight=False, soft_wrap=True)
    dbsp = Path(sys.executable).with_name("dbsp")
    console.print(f"next: {dbsp} masks info {out}/masks.safetensors --gpus 8", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
