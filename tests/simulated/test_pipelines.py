"""Whole tiny pipelines on simulated GPUs: values, and host waits of steady steps."""

from __future__ import annotations

import pytest

from dbsp_cli.tiny_models import make_tiny
from tests.gpu_node.node import GpuNode
from tests.simulated.pipeline_cases import Generation, generated_on_gpus

CASES = {
    "from prompt to frames": (2, Generation(steps=3, output="pt")),
    "predicted masks": (2, Generation("predicted", "U1R2", steps=3)),
    "two transformers": (2, Generation(steps=5, settled=4, second=True)),
    "tiled decode": (2, Generation(steps=1, guidance=1.0, tiled=True, output="pt")),
    "tiled decode on four ranks": (4, Generation(steps=1, strategy="U2R2", tiled=True, output="pt")),
    "guidance on two halves": (4, Generation("predicted", "U1R2", steps=3, guided=True)),
    "parts that are on the GPU while they run": (2, Generation(steps=1, offload=True, tiled=True, output="pt")),
}
LONG = ("from prompt to frames", "predicted masks", "tiled decode", "tiled decode on four ranks")
"""What others do too: predicted masks with guidance, tiles and frames with parts on the GPU while they run."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny("wan", tmp_path_factory.mktemp("tiny") / "wan"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in LONG else ()) for name in CASES]
)
def test_pipeline_on_gpus_equals_one_process_without_host_waits(gpu_node: GpuNode, folder: str, name: str) -> None:
    world, generation = CASES[name]
    for difference, steady, waits in gpu_node.run(world, generated_on_gpus, generation, folder):
        assert difference <= 1e-5
        assert steady == max(0, generation.steps - generation.settled), "as many steps must have been looked at"
        assert waits == {}
