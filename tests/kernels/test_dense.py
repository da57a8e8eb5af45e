"""Dense rows on torch's fused kernels, and on the block kernel if there is none. No GPU: operators are mocks."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from dbsp_kernels import DensePart, attend_dense_part, dense

BATCH, ROWS, BLOCKS, BLOCK, WIDTH, SCALE = 2, 5, 6, 16, 24, 0.3
LENGTHS = torch.tensor([16, 16, 9, 16, 16, 3]).int()


class OnCuda(torch.Tensor):
    """A CPU tensor for which `is_cuda` is True."""

    is_cuda = True


def inputs(dtype=torch.float32) -> tuple[torch.Tensor, ...]:
    shapes = (ROWS, BLOCKS, BLOCKS)
    return tuple(
        torch.randn(BATCH, n, BLOCK, WIDTH, generator=torch.Generator().manual_seed(n)).to(dtype) for n in shapes
    )


def part_of(row_starts: range, rows: int, block_starts: range, blocks: int) -> DensePart:
    lengths = LENGTHS[block_starts[0] : block_starts[0] + blocks]
    tokens = torch.nonzero((torch.arange(BLOCK) < lengths[:, None]).flatten()).flatten()
    return DensePart(row_starts, rows, block_starts, blocks, tokens)


def expected(q, k, v, part: DensePart) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns attention [B, heads, rows, Bq, D] in float64 and its log-sum-exp, head by head."""
    found = []
    for row, block in zip(part.row_starts, part.block_starts, strict=True):
        queries = q[:, row : row + part.rows].double()
        keys, values = (t[:, block : block + part.blocks].flatten(1, 2)[:, part.tokens].double() for t in (k, v))
        scores = torch.einsum("brqd,bkd->brqk", queries, keys) * SCALE
        found.append((torch.einsum("brqk,bkd->brqd", scores.softmax(-1), values), scores.logsumexp(-1)))
    out, lse = (torch.stack(of_heads, dim=1) for of_heads in zip(*found, strict=True))
    return out, lse


ONE_HEAD = part_of(range(0, 5, 5), 5, range(0, 6, 6), 6), part_of(range(1, 4, 3), 3, range(2, 5, 3), 3)
TWO_HEADS = part_of(range(0, 4, 2), 2, range(0, 6, 3), 3), part_of(range(1, 5, 3), 1, range(1, 5, 3), 2)
"""Parts of one head, of two heads side by side and of two with rows and blocks of other heads between them."""


@pytest.fixture
def fused(monkeypatch):
    """Mock of a GPU: its compute capability, torch's checks of inputs and the operators, which compute on the CPU.

    The checks heed the real flags of `sdpa_kernel`.
    """
    state = SimpleNamespace(capability=(8, 0), supported=set(NAMES), cudnn_version=91900, calls=[], errors={})
    aten = torch.ops.aten

    def operator(name):
        def run(q, k, v, *options, scale):
            state.calls.append((name, tuple(q.shape), k.shape[2]))
            if name in state.errors:
                raise state.errors[name]
            given = (t.as_subclass(torch.Tensor).float() for t in (q, k, v))
            out, lse, *_ = aten._scaled_dot_product_flash_attention_for_cpu(*given, 0.0, False, scale=scale)
            if name == "cudnn":
                lse = lse[..., None]
            return out.to(q.dtype), torch.nn.functional.pad(lse, (0, 8)) if name == "efficient" else lse

        return run

    def check(name, is_enabled):
        return lambda inputs, debug: name in state.supported and is_enabled()

    flags = torch.backends.cuda
    monkeypatch.setattr(torch._C, "_can_use_cudnn_attention", check("cudnn", flags.cudnn_sdp_enabled))
    monkeypatch.setattr(torch._C, "_can_use_flash_attention", check("flash", flags.flash_sdp_enabled))
    efficient = check("efficient", flags.mem_efficient_sdp_enabled)
    monkeypatch.setattr(torch._C, "_can_use_mem_efficient_attention", efficient)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: state.cudnn_version)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: state.capability)
    operators = {f"_scaled_dot_product_{name}_attention": operator(name) for name in NAMES}
    monkeypatch.setattr(dense, "aten", SimpleNamespace(**operators))
    dense._chosen.cache_clear()
    yield state
    dense._chosen.cache_clear()


NAMES = ("flash", "efficient", "cudnn")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("parts", [ONE_HEAD, TWO_HEADS], ids=["one head", "two heads"])
def test_each_fused_kernel_returns_the_attention_of_a_part_in_one_call(fused, name, parts):
    fused.capability, fused.supported, tensors = (10, 0), {name}, inputs(torch.bfloat16)
    for part in parts:
        found = attend_dense_part(*tensors, part, SCALE)
        for one, other in zip(found, expected(*tensors, part), strict=True):
            torch.testing.assert_close(one.double(), other, atol=2e-2, rtol=0)
    assert [called for called, *_ in fused.calls] == [name] * 3, "one of them on a block of zeros"
    assert {shape[1] for _, shape, _ in fused.calls[1:]} == {len(parts[0].row_starts)}
    assert dense.fused_kernel(tensors[0].as_subclass(OnCuda)) == name


@pytest.mark.parametrize(
    ("capability", "supported", "name"),
    [
        ((8, 0), {"flash", "efficient", "cudnn"}, "flash"),
        ((8, 0), {"efficient", "cudnn"}, "efficient"),
        ((9, 0), {"flash", "efficient", "cudnn"}, "cudnn"),
        ((9, 0), {"flash", "efficient"}, None),
        ((10, 3), {"flash", "efficient"}, "flash"),
        ((12, 0), {"flash", "efficient", "cudnn"}, "flash"),
        ((12, 0), {"cudnn"}, None),
    ],
)
def test_fused_kernel_of_a_gpu_is_one_that_is_faster_than_the_block_kernel(fused, capability, supported, name):
    fused.capability, fused.supported = capability, supported
    assert dense.fused_kernel(inputs(torch.bfloat16)[0].as_subclass(OnCuda)) == name


def test_fused_kernels_that_fail_or_are_not_trusted_are_passed_over(fused):
    """cuDNN up to 9.15 has faults at lengths that are not multiples of 128."""
    q = inputs(torch.bfloat16)[0].as_subclass(OnCuda)
    assert dense.fused_kernel(inputs()[0].as_subclass(OnCuda)) is None, "float32"
    fused.capability, fused.cudnn_version = (9, 0), 91500
    assert dense.fused_kernel(q) is None
    assert fused.calls == []
    dense._chosen.cache_clear()
    fused.capability, fused.cudnn_version = (10, 0), 91900
    fused.errors = {"cudnn": RuntimeError("No valid execution plans built")}
    assert dense.fused_kernel(q) == "flash"
    dense._chosen.cache_clear()
    fused.errors["flash"] = torch.OutOfMemoryError("out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        dense.fused_kernel(q)


def test_callers_context_plays_no_role(fused):
    """`sdpa_kernel` at the first call decides neither that call nor later ones, and is as it was after it."""
    fused.capability, q = (9, 0), inputs(torch.bfloat16)[0].as_subclass(OnCuda)
    with sdpa_kernel(SDPBackend.MATH):
        assert dense.fused_kernel(q) == "cudnn"
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.math_sdp_enabled()
    assert dense.fused_kernel(q) == "cudnn"
    assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.parametrize("fails", [True, False], ids=["fails", "unsupported"])
def test_dense_rows_without_a_fused_kernel_use_the_block_kernel(fused, caplog, fails):
    """Tries a GPU that supports no kernel, and one on which each of them fails; neither is asked again."""
    fused.supported = set(NAMES) if fails else set()
    fused.errors = {name: RuntimeError("No available kernel") for name in NAMES}
    q, *_ = inputs(torch.bfloat16)
    with caplog.at_level(logging.WARNING, logger="dbsp.kernels"):
        assert [dense.fused_kernel(q.as_subclass(OnCuda)) for _ in range(3)] == [None] * 3
    assert [name for name, *_ in fused.calls] == (["flash", "efficient"] if fails else [])
    assert [record.message.startswith("dense heads run on the block kernel") for record in caplog.records] == [True]


@pytest.mark.parametrize("run", [dense._flash, dense._efficient, dense._cudnn])
@pytest.mark.parametrize("queries", [77, 130])
def test_operators_of_this_torch_take_our_arguments(run, queries):
    q, k = (torch.empty(2, 3, n, 72, dtype=torch.bfloat16, device="meta") for n in (queries, 130))
    out, lse = run(q, k, k, SCALE)
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
