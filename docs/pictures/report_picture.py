"""docs/report.png: the page of a tiny run, as headless Chromium shows it.

python docs/pictures/report_picture.py              runs the small trained model on four ranks, and takes the picture
python docs/pictures/report_picture.py --out DIR    leaves the video and its report in DIR
Needs extra "diffusers", and chromium on the path; without it the report is left and the picture is not taken.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

COMMAND = ("generate", "--config", "tiny-wan-trained", "--prompt", "a red ball bounces over a blue checkered floor")
SETTINGS = ("strategy=U2R2", "reuse=1.05", "dense_schedule={first_steps: 1, last_layers: 1}")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def picture(page: Path, png: Path, width: int, height: int) -> None:
    """Takes a screenshot of a page, if there is a browser."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        print(f"no {BROWSERS[0]} on the path: open {page} in a browser instead", file=sys.stderr)
        return
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    options += [f"--window-size={width},{height}", "--blink-settings=preferredColorScheme=1"]  # light
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, *options, f"--user-data-dir={profile}", f"--screenshot={png}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for the video and its report; default: a temporary one")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--picture", type=Path, default=Path(__file__).parents[2] / "docs" / "report.png")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        out = (options.out or Path(temporary)).resolve()
        line = [sys.executable, "-m", "dbsp_cli", *COMMAND, "--nproc", str(options.ranks)]
        line += ["--steps", str(options.steps), "--cache", "first-block=0.2"]
        line += [part for setting in SETTINGS for part in ("--set", setting)]
        line += ["--out", str(out / "video.mp4"), "--report", str(out / "report")]
        subprocess.run(line, check=True, env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"})
        picture(out / "report" / "report.html", options.picture.resolve(), 1280, 1500)


if __name__ == "__main__":
    main()
