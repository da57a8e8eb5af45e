"""docs/adding-a-model.md: its worked example runs as printed, and is right."""

from __future__ import annotations

import os
import re
import sys

import pytest

from dbsp_diffusers.models import ARCHITECTURES, register_architecture
from tests.support.programs import run
from tests.support.repository import ROOT

PAGE = ROOT / "docs" / "adding-a-model.md"


def test_the_page_s_example_is_right_on_two_ranks(tmp_path):
    (example,) = [
        code for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S) if "init_process" in code
    ]
    script = tmp_path / "example.py"
    script.write_text(example)
    # A log a rank: two ranks' lines in one pipe may run into each other.
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--redirects=3"]
    done = run(
        [sys.executable, *launch, f"--log-dir={tmp_path / 'logs'}", str(script)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    said = {log.parent.name: log.read_text() for log in (tmp_path / "logs").rglob("stdout.log")}
    assert done.returncode == 0, (done.stderr[-2000:], said)
    assert sorted(said) == ["0", "1"]
    for lines in said.values():
        ((from_one_process, from_dense),) = re.findall(r"from one process (\S+), from dense (\S+)", lines)
        assert float(from_one_process) <= 1e-5
        assert float(from_dense) > 1e-3, "the mask must matter"


def test_a_name_is_registered_once():
    with pytest.raises(ValueError, match="known already"):
        register_architecture("WanTransformer3DModel", ARCHITECTURES["FluxTransformer2DModel"])
    register_architecture("WanTransformer3DModel", ARCHITECTURES["WanTransformer3DModel"])
