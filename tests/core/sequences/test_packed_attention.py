"""Several sequences in one attention: each as if it were alone, forward and backward, from loaders and back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch

from dbsp_core import Strategy
from dbsp_core.runtime import chunk_attention
from dbsp_kernels import dense
from tests.core.sequences.packed_cases import PackedCase, cases_for, run_packed, run_page
from tests.support.long import some_long
from tests.support.repository import ROOT

WORLDS = (2, 3, 4, 6)
LONG = ("U1R4", "U3R2", "U1R6", "U6R1")


@contextlib.contextmanager
def dense_rows_on_the_cpu() -> Iterator[None]:
    """Runs dense rows apart from the others in this process, within a block."""
    with (
        patch.object(chunk_attention, "fused_kernel", return_value="cpu"),
        patch.object(dense, "_operator", return_value=("cpu", _attend)),
    ):
        yield


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, scale=scale)
    return out, lse


@pytest.mark.parametrize(
    ("world", "strategy"), some_long([(w, s) for w in WORLDS for s in Strategy.all_for(w)], LONG), ids=str
)
def test_packed_sequences_equal_their_own_attention(threads, world, strategy):
    """Covers dense, window, radial, predicted and random masks; text or none; ranks without sequences."""
    cases = cases_for(strategy)
    with dense_rows_on_the_cpu():
        found = threads(world).run(run_packed, cases)
    for case, *errors in zip(cases, *found, strict=True):
        assert max(map(max, errors)) <= case.tolerance, (case, errors)


def test_triton_kernel_gives_every_sequence_its_own_attention(pool):
    pytest.importorskip("triton")
    errors = pool(2).run(run_packed, [PackedCase("U1R2", 8, kernel="triton", first=(2, 5, 8))])
    assert max(max(one[0]) for one in errors) <= 1e-5


def test_token_that_attends_into_another_sequence_is_found(threads):
    case = PackedCase("U2R1", 4, sabotage="a token attends into another sequence")
    assert max(max(one[0]) for one in threads(2).run(run_packed, [case])) > 1e-3


@pytest.mark.parametrize("world", [2, 4])
def test_example_of_the_page_runs_as_printed(pool, world):
    page = (ROOT / "docs" / "packed-sequences.md").read_text()
    code = "import torch\n" + page.partition("```python\nimport torch\n")[2].partition("```")[0]
    for found in pool(world).run(run_page, code):
        assert found["error"] <= 1e-5
        assert found["gradient"]
        if world == 4:
            assert (round(found["rho"], 2), round(found["before"], 2)) == (1.0, 1.28), "as the page says"
