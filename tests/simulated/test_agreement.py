"""What ranks compare is sent from host to host, independent of their tensors' device."""

from __future__ import annotations

from tests.gpu_node.node import GpuNode
from tests.simulated.agreement_cases import host_waits_of_comparisons, inputs_on_the_host


def test_comparisons_make_no_host_wait(gpu_node: GpuNode) -> None:
    for votes, texts, waits in gpu_node.run(2, host_waits_of_comparisons):
        assert votes == [True, False]
        assert texts == ["rank 0", "rank 1"]
        assert waits == {}


def test_rank_with_inputs_on_the_host_is_named_on_all_ranks(gpu_node: GpuNode) -> None:
    for error in gpu_node.run(3, inputs_on_the_host, 1):
        assert error.startswith("UserError: batch, head size, dtype or device type of q, k and v")
        assert "differ on rank(s) [1]" in error
