"""The program of docs/training.md trains as printed, with a tiny model on three processes, one without data."""

from __future__ import annotations

import os
import re
import sys

import pytest

from dbsp_cli.tiny_models import make_tiny
from tests.support.programs import run
from tests.support.repository import ROOT


@pytest.mark.long
def test_the_program_trains(tmp_path):
    text = (ROOT / "docs" / "training.md").read_text()
    program = next(code for code in re.findall(r"```python\n(.*?)```", text, re.S) if "MODEL =" in code)
    folder = make_tiny("wan", tmp_path / "tiny")
    for line in (f'MODEL = "{folder}"', "LOADERS = [[(3, 8, 12)], [(1, 8, 8)] * 2, []]", "STEPS = 2"):
        program, replaced = re.subn(rf"^{line.split()[0]} = .*$", line, program, flags=re.M)
        assert replaced == 1
    (tmp_path / "train.py").write_text(program)
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", "3", "--rdzv-backend", "c10d"]
    done = run(
        [sys.executable, *launch, "--rdzv-endpoint", "localhost:0", "train.py"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    losses = re.findall(r"step (\d): loss of all samples (\d+\.\d+)", done.stdout)
    assert [step for step, _ in losses] == ["0", "1"]
    assert all(float(loss) > 0 for _, loss in losses)
