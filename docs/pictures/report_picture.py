"""docs/report.png: the page of a tiny run, as headless Chromium shows it.

python docs/pictures/report_picture.py                    runs the small trained model on four ranks, takes the picture
python docs/pictures/report_picture.py --out DIR --runs 2 leaves reports in DIR, the second with other settings
Needs extra "xdit" or "para", and chromium on the path; without it the reports are left and the picture is not.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from dbsp_cli.tiny_models import make_tiny

SPARGE = {"source": "sparge", "cdf": 0.85, "similarity": -1.0, "block_q": 16, "block_k": 16}
DENSE = {"first_steps": 1, "last_layers": 1}
RUNS: tuple[dict[str, Any], ...] = (
    {"mask": SPARGE, "dense_schedule": DENSE, "strategy": "U2R2", "reuse": 1.05},
    {"mask": SPARGE, "strategy": "U1R4", "planner": "paper"},
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def generate(rank: int, world: int, store: str, model: str, config: dict[str, Any], steps: int) -> None:
    """One rank of one generation."""
    from diffusers import WanPipeline

    import dbsp_para

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    pipe = WanPipeline.from_pretrained(model, torch_dtype=torch.float32, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    dbsp_para.parallelize_pipe(pipe, config=config)
    size = {"height": 144, "width": 240, "num_frames": 33, "num_inference_steps": steps, "guidance_scale": 3.0}
    pipe(prompt="a red ball bounces over a blue checkered floor", output_type="latent", **size)
    dist.destroy_process_group()


def picture(page: Path, png: Path, width: int, height: int, dark: bool = False) -> bool:
    """A screenshot of a page. returns: whether there was a browser to take it"""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"no {BROWSERS[0]} on the path: open {page} in a browser instead", file=sys.stderr)
        return False
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--window-size={width},{height}",
    ]
    options += ["--blink-settings=preferredColorScheme=0"] if dark else ["--blink-settings=preferredColorScheme=1"]
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, *options, f"--user-data-dir={profile}", f"--screenshot={png}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the reports; default: a temporary one")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--runs", type=int, choices=(1, 2), default=1)
    parser.add_argument("--picture", type=Path, default=Path(__file__).parents[2] / "docs" / "report.png")
    options = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    with tempfile.TemporaryDirectory() as temporary:
        out = (options.out or Path(temporary)).resolve()
        model = str(make_tiny("wan-trained", Path(temporary) / "tiny-wan-trained"))
        for number, config in enumerate(RUNS[: options.runs]):
            store = str(Path(temporary) / f"store-{number}")
            config = {**config, "report": str(out / f"run-{number}")}
            arguments = (options.ranks, store, model, config, options.steps)
            multiprocessing.spawn(generate, arguments, nprocs=options.ranks)
        picture(out / "run-0" / "report.html", options.picture.resolve(), 1280, 1500)


if __name__ == "__main__":
    main()
