"""The scripts of docs/diffusers.md and docs/paraattention.md run as printed, on two processes with a tiny model."""

from __future__ import annotations

import ast
import os
import re
import sys

import pytest

from tests.support.programs import run
from tests.support.repository import ROOT

pytest.importorskip("para_attn")


@pytest.mark.long
@pytest.mark.parametrize("page", ["diffusers", "paraattention"])
def test_the_script_makes_a_video_and_shows_what_sparse_attention_does(tmp_path, monkeypatch, page, dbsp):
    text = (ROOT / "docs" / f"{page}.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", text, re.S)
    script, instead = [code for code in programs if "MODEL =" in code]
    (command,) = re.findall(r"`dbsp (tiny wan-trained \S+)`", text)
    monkeypatch.chdir(tmp_path)
    code, _, err = dbsp(*command.split())
    assert code == 0, err
    less = '"num_frames": 17, "num_inference_steps": 2'
    instead, fewer = re.subn('"num_frames": 33, "num_inference_steps": 12', less, instead)
    assert fewer == 1
    for line in instead.splitlines():
        script, replaced = re.subn(rf"^{line.split()[0]} = .*$", line, script, flags=re.M)
        assert replaced == 1
    (tmp_path / "generate.py").write_text(script)
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--rdzv-backend", "c10d"]
    done = run(
        [sys.executable, *launch, "--rdzv-endpoint", "localhost:0", "generate.py"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "video.mp4").stat().st_size > 1000
    assert "left nothing out" not in done.stderr
    shown = ast.literal_eval(done.stdout.strip().splitlines()[-1])
    assert shown["calls"] > 0
    assert 1.001 < shown["mean_rho"] < 1.5
