"""Forward passes of a transformer on simulated GPUs: all compute with the first rank's inputs, without host waits."""

from __future__ import annotations

from tests.gpu_node.node import GpuNode
from tests.simulated.pass_cases import passes

TOLERANCE = 1e-5
COMPARING = "dbsp_diffusers/sharding/generation_checks.py"


def test_steady_passes_use_the_first_rank_s_inputs_without_host_waits(gpu_node: GpuNode) -> None:
    for errors, waits in gpu_node.run(2, passes):
        assert max(errors) <= TOLERANCE, errors
        assert any(COMPARING in line for line in waits[0]), "inputs are compared"
        assert any(COMPARING in line for line in waits[5]), "timesteps are known a pass later"
        assert waits[2] == waits[3] == [], waits
