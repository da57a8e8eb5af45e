"""The scripts of docs/diffusers.md and docs/paraattention.md run as printed, on two processes with a tiny model."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from dbsp_cli.tiny_models import make_tiny
from repository import ROOT

pytest.importorskip("para_attn")


@pytest.mark.parametrize("page", ["diffusers", "paraattention"])
def test_the_script_makes_a_video(tmp_path, page):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    script = next(code for code in re.findall(r"```python\n(.*?)```", text, re.S) if "MODEL =" in code)
    folder = make_tiny("wan", tmp_path / "tiny")
    for line in (
        f'MODEL = "{folder}"',
        'SIZE = {"height": 64, "width": 96, "num_frames": 9, "num_inference_steps": 2}',
    ):
        script, replaced = re.subn(rf"^{line.split()[0]} = .*$", line, script, flags=re.M)
        assert replaced == 1
    (tmp_path / "generate.py").write_text(script)
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv-backend", "c10d"]
    done = subprocess.run(
        [sys.executable, *launch, "--rdzv-endpoint", "localhost:0", "generate.py"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "video.mp4").stat().st_size > 1000
