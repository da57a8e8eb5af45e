"""Dense rows on torch's fused kernels, and on the block kernel if there is none. No GPU: operators are stubs."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend

from dbsp_core.runtime import chunk_attention
from dbsp_kernels import DensePart, attend_dense_part, dense, merge_states
from dbsp_kernels.triton import merge
from tests.support.interpreter import interpreted

BATCH, ROWS, BLOCKS, BLOCK, WIDTH, SCALE = 2, 5, 6, 16, 24, 0.3
LENGTHS = torch.tensor([16, 16, 9, 16, 16, 3]).int()


class OnCuda(torch.Tensor):
    """A CPU tensor for which `is_cuda` is True."""

    is_cuda = True


def plain(t: torch.Tensor) -> torch.Tensor:
    return t.as_subclass(torch.Tensor)


def inputs(dtype=torch.float32) -> tuple[torch.Tensor, ...]:
    shapes = (ROWS, BLOCKS, BLOCKS)
    return tuple(
        torch.randn(BATCH, n, BLOCK, WIDTH, generator=torch.Generator().manual_seed(n)).to(dtype) for n in shapes
    )


def part_of(rows: tuple[int, int], blocks: tuple[int, int]) -> DensePart:
    lengths = LENGTHS[slice(*blocks)]
    return DensePart(rows, blocks, torch.nonzero((torch.arange(BLOCK) < lengths[:, None]).flatten()).flatten())


def expected(q, k, v, part: DensePart) -> tuple[torch.Tensor, torch.Tensor]:
    q = q[:, slice(*part.rows)].double()
    k, v = (t[:, slice(*part.blocks)].flatten(1, 2)[:, part.tokens].double() for t in (k, v))
    scores = torch.einsum("brqd,bkd->brqk", q, k) * SCALE
    return torch.einsum("brqk,bkd->brqd", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.fixture
def fused(monkeypatch):
    """Tensors seem to be on a GPU on which torch chooses `backend`; its operator computes on the CPU, in float32."""
    state = SimpleNamespace(backend=SDPBackend.FLASH_ATTENTION, calls=[], error=None, lse_padding=0)
    aten = torch.ops.aten

    def operator(name):
        def run(q, k, v, *options, scale):
            state.calls.append((name, q.shape[2], k.shape[2]))
            if state.error is not None:
                raise state.error
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
                *(plain(t).float() for t in (q, k, v)), 0.0, False, scale=scale
            )[:2]
            if name == "cudnn":
                lse = lse[..., None]
            return out.to(q.dtype), torch.nn.functional.pad(lse, (0, 8)) if name == "efficient" else lse

        return run

    operators = {f"_scaled_dot_product_{name}_attention": operator(name) for name in BACKENDS}
    monkeypatch.setattr(dense, "aten", SimpleNamespace(**operators))
    monkeypatch.setattr(torch, "_fused_sdp_choice", lambda *args, **options: state.backend.value)
    dense._operator.cache_clear()
    yield state
    dense._operator.cache_clear()


BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


@pytest.mark.parametrize("name", BACKENDS)
def test_each_of_torchs_choices_returns_the_rows_attention(fused, name):
    fused.backend, tensors = BACKENDS[name], inputs(torch.bfloat16)
    for part in (part_of((0, 5), (0, 6)), part_of((1, 4), (2, 5))):
        found = attend_dense_part(*tensors, part, SCALE)
        for one, other in zip(found, expected(*tensors, part), strict=True):
            torch.testing.assert_close(plain(one).double(), other, atol=2e-2, rtol=0)
    assert [called for called, *_ in fused.calls] == [name] * 3, "one of them on a block of zeros"
    assert dense.fused_kernel(tensors[0].as_subclass(OnCuda)) == name


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_dense_rows_without_a_fused_kernel_use_the_block_kernel(fused, caplog, backend):
    """Tries a torch that chooses none, and one whose choice raises; neither is asked again."""
    fused.backend, fused.error = backend, RuntimeError("No available kernel")
    q, *_ = inputs(torch.bfloat16)
    with caplog.at_level(logging.WARNING, logger="dbsp.kernels"):
        assert [dense.fused_kernel(q.as_subclass(OnCuda)) for _ in range(3)] == [None] * 3
    assert len(fused.calls) == (backend is not SDPBackend.MATH)
    assert [record.message.startswith("dense heads run on the block kernel") for record in caplog.records] == [True]


def test_out_of_memory_is_not_hidden_by_the_block_kernel(fused):
    fused.error = torch.OutOfMemoryError("out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        dense.fused_kernel(inputs(torch.bfloat16)[0].as_subclass(OnCuda))


def test_float32_on_a_gpu_is_left_to_the_block_kernel(fused):
    assert dense.fused_kernel(inputs()[0].as_subclass(OnCuda)) is None
    assert fused.calls == []


def test_cudnn_is_given_few_numbers_of_queries():
    tokens = 1182 * 64
    sizes = {rows: dense._graph_queries(64 * rows, tokens) for rows in range(1, 1183)}
    assert all(64 * rows <= size <= 64 * rows * 1.07 or size - 64 * rows < 64 for rows, size in sizes.items())
    assert len(set(sizes.values())) <= 120
    near = {dense._graph_queries(64 * rows, tokens) for rows in range(560, 620)}
    assert len(near) <= 3, "a plan that moves a few rows needs no new graph"
    assert sizes[1182] == tokens, "a whole head is not padded"


@pytest.mark.parametrize("run", [dense._flash, dense._efficient, dense._cudnn])
@pytest.mark.parametrize("queries", [77, 130])
def test_operators_of_this_torch_take_our_arguments(run, queries):
    q, k = (torch.empty(2, 3, n, 72, dtype=torch.bfloat16, device="meta") for n in (queries, 130))
    out, lse = run(q, k, k, SCALE)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)


@pytest.mark.parametrize("batch", [1, 2])
def test_dense_rows_of_a_batch_are_merged_in_one_launch_per_part(monkeypatch, batch):
    """Rows of every item lie apart in memory: no reason for several passes over them."""
    q, k, v = (t[:batch] for t in inputs())
    parts = (part_of((0, 2), (0, 3)), part_of((3, 5), (3, 6)))
    before, lse = torch.randn(batch, ROWS, BLOCK, WIDTH), torch.randn(batch, ROWS, BLOCK)
    lse[:, 3] = -torch.inf
    running = before.flatten(0, 1).clone(), lse.flatten(0, 1).clone()
    launches, launch = [], merge.launch
    monkeypatch.setattr(merge, "launch", lambda *args, **options: (launches.append(args), launch(*args, **options)))
    monkeypatch.setattr(chunk_attention, "merge_into", merge.triton_merge_into)
    monkeypatch.setattr(
        chunk_attention,
        "attend_dense_part",
        lambda *given: [one.float().contiguous() for one in expected(*given[:-1])],
    )
    table = SimpleNamespace(dense=SimpleNamespace(parts=parts))
    with interpreted():
        packed = (t.flatten(0, 1) for t in (q, k, v))
        out, out_lse = chunk_attention._with_dense_rows(running, *packed, table, batch, SCALE)
    assert len(launches) == len(parts)
    for part in parts:
        rows = slice(*part.rows)
        given = (t[:, rows].double() for t in (before.masked_fill(lse.isneginf()[..., None], 0), lse))
        for one, other in zip((out, out_lse), merge_states(*given, *expected(q, k, v, part)), strict=True):
            torch.testing.assert_close(one.unflatten(0, (batch, ROWS))[:, rows].double(), other, atol=1e-5, rtol=1e-5)
    kept = out.unflatten(0, (batch, ROWS))[:, 2]
    assert torch.equal(kept, before[:, 2]), "other rows stay as they were"
