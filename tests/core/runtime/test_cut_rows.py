"""Whole attentions on kernels that cut long rows, over ranks, chunks and batches, against the dense oracle."""

from __future__ import annotations

import threading
from dataclasses import replace
from unittest import mock

import pytest
import torch

from dbsp_core.layout.strategy import Strategy
from dbsp_core.runtime import chunk_attention, tables
from dbsp_kernels import KERNELS, schedule
from dbsp_kernels.triton import merge
from tests.support.attention_cases import Case, run_case
from tests.support.interpreter import interpreted
from tests.support.thread_ranks import ThreadRanks

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="scripts/gpu_suite runs the kernels")

CASES = {
    "one rank": Case("U1R1", heads=2),
    "heads, batch": Case("U2R1", dense_heads=1, batch=2),
    "three chunks": Case("U1R3", tokens=330, heads=1, text_tokens=21),
    "any owner": Case("U2R2", planner="random", heads=2),
    "bfloat16": Case("U1R2", dtype=torch.bfloat16),
}


def run_cut(case: Case) -> tuple[float, int]:
    """Returns the largest error of any rank, and the rows that were cut in all chunks of all ranks."""
    cut: list[int] = []
    merged = merge.triton_merge_parts

    def counting(*arguments):
        cut.append(int((arguments[4][:, 2] > 0).sum()))
        merged(*arguments)

    kernel, lock = KERNELS["triton"], threading.Lock()

    def one_at_a_time(inputs):
        with lock:  # the interpreter knows one launch a process
            return kernel.run(inputs)

    cutting = replace(kernel, name="cutting", run=one_at_a_time, slots=lambda q, blocks: 20)
    with (
        interpreted(),
        mock.patch.dict(KERNELS, cutting=cutting),
        mock.patch.multiple(schedule, LEAST_BLOCKS=2, PART_BLOCKS=-(10**6)),  # however little is gained
        mock.patch.object(tables, "LEAST_BLOCKS", 2),
        mock.patch("dbsp_kernels.triton.forward.triton_merge_parts", counting),
    ):
        errors = ThreadRanks(Strategy.parse(case.strategy).world).run(run_case, replace(case, kernel="cutting"))
    return max(errors), sum(cut)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_attention_with_rows_in_parts_is_the_reference(case):
    error, cut = run_cut(case)
    assert cut > 0
    assert error <= (1e-5 if case.dtype == torch.float32 else 2e-2)


def test_parts_that_are_not_merged_are_seen():
    """Negative control."""
    with mock.patch.object(merge, "triton_merge_parts"):
        error, cut = run_cut(CASES["bfloat16"])
    assert (cut > 0, error <= 2e-2) == (True, False)


def test_rows_far_below_a_slots_share_are_not_cut():
    with mock.patch.object(chunk_attention, "LONG_ROW", 100.0):
        assert run_cut(CASES["one rank"])[1] == 0
