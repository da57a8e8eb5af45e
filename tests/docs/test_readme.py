"""README's program of the attention alone runs as printed, and computes what torch does."""

from __future__ import annotations

import os
import re
import sys

from tests.support.programs import run
from tests.support.repository import ROOT


def test_the_attention_alone_equals_torch_s_own(tmp_path):
    text = (ROOT / "README.md").read_text()
    (program,) = [code for code in re.findall(r"```python\n(.*?)```", text, re.S) if "DualBalancedAttention" in code]
    script = tmp_path / "attention.py"
    script.write_text(program)
    # A log a rank: two ranks' lines in one pipe may run into each other.
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--redirects=3"]
    done = run(
        [sys.executable, *launch, f"--log-dir={tmp_path / 'logs'}", str(script)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    said = [log.read_text() for log in sorted((tmp_path / "logs").rglob("stdout.log"))]
    assert done.returncode == 0, (done.stderr[-2000:], said)
    found = re.fullmatch(r"rank 0: largest difference (\S+)\nrank 1: largest difference (\S+)\n", "".join(said))
    assert found is not None, said
    assert all(0 < float(difference) < 1e-5 for difference in found.groups())
