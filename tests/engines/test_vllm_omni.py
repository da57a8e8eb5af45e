"""vLLM-Omni with backend DBSP: its own Wan on CPU ranks equals one process of it, where stock it refuses or is wrong.

Runs in an environment of its own: `scripts/engines test`.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_omni", reason="run scripts/engines test")
HERE = Path(__file__).parent
KNOWN = "synthetic:density=0.4,block_q=16,block_k=8"
OTHER = "synthetic:density=0.4,block_q=16,block_k=8,seed=7"
PREDICTED = "sparge:cdf=0.6,block_q=16,block_k=8"
EVEN, UNEVEN = (3, 4, 6), (3, 5, 5)


@pytest.fixture(scope="module")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the entry point of the CPU platform, as pip would install it."""
    folder = tmp_path_factory.mktemp("plugins")
    info = folder / "cpu_platform-0.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-platform\nVersion: 0.0\n")
    (info / "entry_points.txt").write_text("[vllm_omni.platform_plugins]\ncpu = vllm_omni_platform:platform\n")
    return folder


def run(plugins: Path, ulysses: int, ring: int, *cases: dict[str, Any], **environment: str) -> list[dict[str, Any]]:
    """What each case found."""
    paths = f"{plugins}:{HERE}:{os.environ['PYTHONPATH']}"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ulysses * ring)]
    command += [str(HERE / "vllm_omni_cases.py"), str(ulysses), str(ring), json.dumps(cases)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=os.environ | {"PYTHONPATH": paths} | environment
    )
    found = [json.loads(line[5:]) for line in done.stdout.splitlines() if line.startswith("CASE ")]
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(found) == len(cases)
    return found


def assert_exact(cases: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    for case, one in zip(cases, found, strict=True):
        assert "refused" not in one, (case, one)
        assert one["error"] <= 1e-5, (case, one)
        assert one["dense"] > 1e-2, f"the mask matters: {case, one}"


@pytest.mark.parametrize(("ulysses", "ring"), [(2, 1), (1, 2), (2, 2)])
def test_it_equals_one_process(plugins, ulysses, ring):
    cases = [
        {"heads": 3, "sizes": [EVEN, UNEVEN, EVEN], "mask": KNOWN},
        {"heads": 5, "sizes": [UNEVEN], "mask": PREDICTED, "passes": 2},
        {"heads": 3, "sizes": [UNEVEN, EVEN], "mask": PREDICTED, "pair": True, "passes": 2},
    ]
    found = run(plugins, ulysses, ring, *cases)
    assert_exact(cases, found)
    assert found[1]["padding"] == -75 % (ulysses * ring), "75 tokens do not divide by the ranks"


def test_on_one_rank_too(plugins):
    cases = [{"heads": 3, "sizes": [UNEVEN], "mask": KNOWN}]
    assert_exact(cases, run(plugins, 1, 1, *cases))


def test_another_mask_would_be_seen(plugins):
    (found,) = run(plugins, 2, 1, {"heads": 3, "sizes": [UNEVEN], "mask": KNOWN, "wrong": OTHER})
    assert found["error"] > 1e-2


def test_what_vllm_omni_refuses_or_computes_otherwise_without_it(plugins):
    heads, padded = run(
        plugins, 2, 1, {"heads": 3, "sizes": [EVEN], "mask": None}, {"heads": 4, "sizes": [UNEVEN], "mask": None}
    )
    assert "strict mode" in heads["refused"]
    assert padded["error"] > 1e-3, "padding is attended to"
    (ring,) = run(plugins, 1, 2, {"heads": 4, "sizes": [UNEVEN], "mask": None})
    assert "Cannot use Ring attention which does not support attention_mask" in ring["refused"]


def test_nothing_changes_where_dbsp_is_not_named(plugins):
    case = {"heads": 4, "sizes": [EVEN, UNEVEN], "mask": None}
    assert run(plugins, 2, 1, case) == run(plugins, 2, 1, case, VLLM_PLUGINS="cpu")


def test_the_names_that_it_uses_are_there():
    from dbsp_vllm_omni.plugin import NAMES

    for name in NAMES:
        owner, parts = name, []
        while True:
            try:
                found = importlib.import_module(owner)
                break
            except ModuleNotFoundError:
                owner, _, part = owner.rpartition(".")
                parts.insert(0, part)
        for part in parts:
            found = getattr(found, part)
