"""The simulated node itself: it finds what it is there to find, and lets right programs pass."""

from __future__ import annotations

import pytest

from tests.gpu_node.node import GpuNode
from tests.simulated import node_cases

UNSUPPORTED = {
    "mixed devices": (1, "Expected all tensors to be on the same device"),
    "host and device": (0, "host tensors of shapes [(1,)]"),
    "to numpy": (0, "Use Tensor.cpu() first"),
    "read without a wait": (0, "without a wait"),
    "overwritten while read": (0, "overwrites what is read"),
    "read after an earlier event": (0, "without a wait"),
    "a context on another device": (0, "a context on cuda:1, in a thread of the rank on cuda:0"),
    "a thread without its device": (1, "a context on cuda:0, in a thread of the rank on cuda:1"),
    "a launch while another device is current": (0, "but the current device is 1"),
    "a launch with a host tensor": (0, "on the host"),
    "a grid that is too large": (0, "grid (1, 65536)"),
    "too much shared memory": (0, "sm90 has 232448"),
    "a host tensor to NCCL": (0, "CPU tensor given to NCCL"),
    "a device tensor to gloo": (0, "given to gloo"),
    "a barrier on NCCL": (0, "NCCL has none"),
    "changed in flight": (0, "changed before it waited"),
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_node_rejects_what_cuda_rejects(gpu_node: GpuNode, name: str) -> None:
    rank, text = UNSUPPORTED[name]
    said = gpu_node.run(2, node_cases.rejected, name)[rank]
    assert said is not None, "it ran"
    assert text in said


def test_node_runs_a_right_program(gpu_node: GpuNode) -> None:
    assert gpu_node.run(2, node_cases.rejected, "right") == [None, None]


def test_host_waits_are_counted_at_their_lines(gpu_node: GpuNode) -> None:
    (found,) = gpu_node.run(1, node_cases.waits)
    assert found == {
        "_local_scalar_dense, line 6": 1,
        "tolist, line 7": 1,
        "copy to the host, line 8": 1,
        "nonzero, line 9": 1,
        "index, line 10": 1,
        "copy from pageable memory, line 11": 1,
        "copy from the host, line 12": 1,
        "synchronize, line 14": 1,
    }


def test_variants_are_counted_as_triton_specialises(gpu_node: GpuNode) -> None:
    """Not by numbers and addresses that a kernel leaves unspecialised."""
    assert gpu_node.run(1, node_cases.variants) == [(1, 2)]


def test_asynchronous_copy_is_not_there_before_the_host_waits(gpu_node: GpuNode) -> None:
    ((before, after),) = gpu_node.run(1, node_cases.late_copy)
    assert before != [0, 1, 2] == after


def test_backward_runs_on_the_device_of_its_tensors(gpu_node: GpuNode) -> None:
    for rank, (gradient, current, device) in enumerate(gpu_node.run(2, node_cases.gradients)):
        assert (gradient, current, device) == ([0.0, 8.0, 16.0], rank, f"cuda:{rank}")


def test_peak_bytes_are_counted_and_views_keep_memory(gpu_node: GpuNode) -> None:
    assert gpu_node.run(1, node_cases.peaks) == [(1500, 500)]
