"""The kernels on a GPU, against the reference in float64. Needs pytest alone, so that it runs on bare GPU machines."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from dbsp_core import BlockGrid, BlockMask, make_plan
from dbsp_core.runtime.kernel_tables import build_tables, table_layout
from dbsp_kernels import KERNELS, KernelRequirements, block_attention, merge_into, merge_states
from dbsp_kernels.packing.int8_rows import quantise_segments, restore_rows, row_words
from dbsp_kernels.packing.row_bits import expand_rows
from dbsp_kernels.packing.segment_copy import CopySegments, copy_segments
from tests.kernels.packed_inputs import full_counts, kinder, packed, relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
MOST_ERROR = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.fixture(autouse=True)
def poison():
    """Whatever torch leaves uninitialised is NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def assert_right(p, kernel, **options):
    out, lse = p.to("cuda").attend(kernel, **options)
    expected, expected_lse = p.exact()
    assert relative_error(out.cpu(), expected) <= MOST_ERROR[p.q.dtype]
    some = p.kv_count > 0
    assert (lse.cpu()[some] - expected_lse[some]).abs().max() <= 2e-3
    assert (out.cpu()[~some] == 0).all()
    assert torch.isneginf(lse.cpu()[~some]).all()


@pytest.mark.parametrize("kernel", ["triton", "fa4"])
@pytest.mark.parametrize("dtype", MOST_ERROR, ids=str)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("block_q", "block_k"), itertools.product((64, 128), repeat=2))
def test_every_mix_of_blocks(kernel, dtype, width, block_q, block_k):
    reason = KERNELS[kernel].why_unsupported("cuda", dtype, KernelRequirements((block_q, block_k), width))
    if reason is not None:
        pytest.skip(reason)
    p = packed(rows=40, blocks=30, block_q=block_q, block_k=block_k, width=width, dtype=dtype, seed=block_q + width)
    p = kinder(replace(p, kv_index=p.kv_index.clamp(min=0)))
    for hint in (None, full_counts(p).cuda()):
        assert_right(p, kernel, kv_full=hint)


@pytest.mark.parametrize("dtype", MOST_ERROR, ids=str)
@pytest.mark.parametrize(("block_q", "block_k", "width"), [(48, 33, 24), (17, 160, 40), (192, 16, 80), (64, 64, 256)])
def test_odd_shapes(dtype, block_q, block_k, width):
    assert_right(packed(rows=20, blocks=9, block_q=block_q, block_k=block_k, width=width, dtype=dtype), "triton")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_partial_result_takes_in_another(dtype):
    p = packed(rows=24, blocks=16, block_q=64, block_k=64, width=128, dtype=dtype)
    half = p.kv_count // 2
    rest = torch.arange(16)[None] + half[:, None]
    later = p.kv_index.gather(1, rest.clamp(max=15))
    first = replace(p, kv_count=half).to("cuda").attend("triton", out_dtype=torch.float32)
    second = replace(p, kv_index=later, kv_count=p.kv_count - half).to("cuda")
    apart = merge_states(*first, *second.attend("triton"))
    merged = tuple(t.clone() for t in first)
    merge_into(*merged, *second.attend("triton"))
    out, lse = second.attend("triton", partial=first, out_dtype=dtype)
    expected, _ = p.exact()
    for result in (out, apart[0], merged[0]):
        assert relative_error(result.cpu(), expected) <= MOST_ERROR[dtype]
    torch.testing.assert_close(lse, merged[1])


def test_range_checks_on_request(monkeypatch):
    p = packed(block_q=64, block_k=64).to("cuda")
    bad = replace(p, kv_index=torch.full_like(p.kv_index, 6), kv_count=torch.ones_like(p.kv_count))
    monkeypatch.setenv("DBSP_DEBUG", "1")
    with pytest.raises(ValueError, match="between 0 and 5"):
        bad.attend("triton")


def test_tables_and_attention_do_not_synchronise():
    torch.use_deterministic_algorithms(False)  # has synchronisations of its own
    grid = BlockGrid.uniform(2000, 64)
    generator = torch.Generator("cuda").manual_seed(0)
    mask = BlockMask(torch.rand(3, grid.nq, grid.nk, generator=generator, device="cuda") < 0.4, grid)
    plan = make_plan(mask, "U2R2")
    q, k, v = torch.randn(3, 120, 64, 64, device="cuda", dtype=torch.bfloat16)

    def step():
        for rank in range(4):
            for kept in build_tables(table_layout(plan.assignment, rank).to(torch.device("cuda")), mask):
                table = vars(kept.expanded(2))
                rows, blocks = len(table["kv_count"]), len(table["kv_len"])
                block_attention(q[:1].expand(rows, -1, -1), k[:1].expand(blocks, -1, -1), v[:1].expand(blocks, -1, -1),
                                **table)  # fmt: skip

    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("batch", [1, 3])
def test_tables_equal_the_cpu_twin(batch):
    rng = np.random.default_rng(0)
    bits = torch.from_numpy(rng.integers(0, 256, (50, 150), dtype=np.uint8))
    length = torch.from_numpy(rng.integers(63, 65, 1200)).int()
    base = torch.zeros(50, dtype=torch.int32)
    needed = torch.from_numpy(np.unpackbits(bits.numpy(), axis=1, bitorder="little")).bool()
    full = (needed & (length == 64)).sum(1).int()
    arguments = (bits, base, length, full)
    expected = expand_rows(*arguments, 1200, 64, batch)
    index = expand_rows(*(t.cuda() for t in arguments), 1200, 64, batch).cpu()
    used = (torch.arange(1200) < needed.sum(1)[:, None]).repeat(batch, 1)
    assert torch.equal(index[used], expected[used])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("mean", "width"), [(1, 128), (64, 128), (20, 23), (64, 64)])
def test_int8_rows_have_the_cpu_twins_bits(mean, width, dtype):
    count, rng = 500, np.random.default_rng(mean)
    length = rng.integers(1, 2 * mean + 1, count)
    to = np.cumsum(length) - length
    table = np.stack([rng.integers(5, size=count), rng.integers(0, 400, count), 0 * to, to, length, 0 * to], axis=1)
    source = (torch.randn(2, 600, 5, width) * 10.0 ** torch.randint(-4, 4, (2, 600, 5, 1))).to(dtype).transpose(1, 2)
    source[0, 0, ::7], source[1, 2, 5, 3] = 0, torch.inf
    less = torch.randn(2, 5, width)
    expected = torch.zeros(2, 1, int(length.sum()), row_words(width), dtype=torch.int32)
    found = torch.full_like(expected, 7, device="cuda")
    quantise_segments(source, expected, CopySegments.of(table, torch.device("cpu")), less)
    quantise_segments(source.cuda(), found, CopySegments.of(table, torch.device("cuda")), less.cuda())
    scales = [rows.view(torch.float32)[..., -1].cpu().nan_to_num(-1.0) for rows in (found, expected)]
    assert torch.equal(*scales)
    assert torch.equal(found[..., :-1].cpu(), expected[..., :-1])
    restored = [restore_rows(rows, width, dtype).cpu().nan_to_num(-1.0) for rows in (found, expected)]
    assert torch.equal(*restored)


@pytest.mark.parametrize("mean", [1, 64])
def test_runs_equal_the_cpu_twin(mean):
    count = 500
    rng = np.random.default_rng(mean)
    length = rng.integers(1, 2 * mean + 1, count)
    to = np.cumsum(length + 1) - (length + 1)
    table = np.stack(
        [rng.integers(5, size=count), rng.integers(0, 400, count), 0 * to, to, length, 0 * to + 1], axis=1
    )
    source = torch.randn(2, 600, 5, 128).transpose(1, 2).bfloat16()
    expected = torch.zeros(2, 1, int((length + 1).sum()), 128).bfloat16()
    copied = torch.full_like(expected, torch.nan, device="cuda")
    copy_segments(source, expected, CopySegments.of(table, torch.device("cpu")))
    copy_segments(source.cuda(), copied, CopySegments.of(table, torch.device("cuda")))
    assert torch.equal(copied.cpu(), expected)
