"""Kernels of others, on this side of their calls, and which kernels support a request. No GPU."""

from __future__ import annotations

import importlib.util
import sys
import types
from dataclasses import replace

import pytest
import torch

from dbsp_kernels import KERNELS, KernelInputs, KernelRequirements, available, choose_kernel, require_supported
from dbsp_kernels.backends import fa4, flashinfer, sparge
from dbsp_kernels.errors import UserError
from dbsp_kernels.triton import launch
from tests.kernels.packed_inputs import Packed, full_counts, kinder, packed, relative_error
from tests.support.interpreter import interpreted


def inputs_of(p: Packed, **options) -> KernelInputs:
    return KernelInputs(*vars(p).values(), p.q.shape[-1] ** -0.5, **options)


def test_whole_heads_with_their_mask(monkeypatch):
    """Compares with a stub for SpargeAttn's function, which is passed heads, tokens and a block mask."""
    heads, tokens, block_q, block_k, head_dim = 3, 29, 8, 6, 16
    generator = torch.Generator().manual_seed(0)
    bits = torch.rand(heads, 4, 5, generator=generator) < 0.5
    bits[1, 2] = False
    poison = torch.nan

    def stub(q, k, v, mask_id, scale, tensor_layout, output_dtype):
        assert (q.shape, mask_id.shape, tensor_layout) == ((1, heads, tokens, head_dim), (1, heads, 4, 5), "HND")
        assert torch.equal(mask_id[0].bool(), bits)
        allowed = bits.repeat_interleave(block_q, 1).repeat_interleave(block_k, 2)[:, :tokens, :tokens]
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed[None], scale=scale)
        return out.masked_fill(~allowed.any(-1)[None, ..., None], poison).to(output_dtype)

    module = types.SimpleNamespace(block_sparse_sage2_attn_cuda=stub)
    monkeypatch.setitem(sys.modules, "spas_sage_attn", module)
    q = torch.randn(heads * 4, block_q, head_dim, generator=generator)
    k, v = torch.randn(2, heads * 5, block_k, head_dim, generator=generator)
    count = bits.sum(-1).flatten().int()
    index = torch.argsort(~bits, dim=-1, stable=True) + 5 * torch.arange(heads)[:, None, None]
    length = torch.tensor([6, 6, 6, 6, 5] * heads).int()
    p = Packed(q, k, v, index.flatten(0, 1).int(), count, length)
    out, lse = sparge.sparge_attention(KernelInputs(*vars(p).values(), head_dim**-0.5, head_tokens=tokens))
    expected = p.exact()[0].unflatten(0, (heads, 4)).flatten(1, 2)[:, :tokens]
    torch.testing.assert_close(out.view(heads, -1, head_dim)[:, :tokens], expected.float())
    assert (out[6] == 0).all()
    assert lse.isnan().all()


@pytest.mark.parametrize("name", ["fa4", "flashinfer", "sparge"])
def test_missing_package_raises_with_an_install_command(monkeypatch, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(ValueError, match=f"kernel '{name}' cannot be used here: .*(pip install|build it)"):
        choose_kernel(name, "cuda", torch.bfloat16)


@pytest.mark.parametrize(
    ("name", "capability", "needs", "message"),
    [
        ("sparge", (12, 0), KernelRequirements(), r"compute capability 8.0, .*, 9.0, got 12.0"),
        ("fa4", (9, 0), KernelRequirements((64, 64), 128), r"blocks of 128×128 .*, got 64×64"),
        ("flashinfer", (12, 0), KernelRequirements((64, 64), 64), r"head dims 128, got 64"),
    ],
)
@pytest.mark.usefixtures("installed")
def test_unsupported_request_is_rejected(monkeypatch, name, capability, needs, message):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    with pytest.raises(ValueError, match=f"kernel '{name}' cannot be used here: .*{message}.*; use "):
        choose_kernel(name, "cuda", torch.bfloat16, needs)


@pytest.mark.usefixtures("installed")
def test_blocks_that_this_gpus_kernel_lacks_are_rejected_without_tensors(monkeypatch):
    """Sessions ask so when they are made: on Hopper SpargeAttn has blocks of another shape."""
    gpu, needs = torch.device("cuda"), KernelRequirements((128, 64))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    require_supported("sparge", needs, gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    require_supported("sparge", needs)
    require_supported("cpu", needs, gpu)
    with pytest.raises(
        UserError, match=r"kernel 'sparge' does not support this plan: it supports blocks of 64×128 \("
    ):
        require_supported("sparge", needs, gpu)
    with pytest.raises(UserError, match=r"supports blocks of 64×128, 128×64 \(.*\), got 64×64; use cpu or triton"):
        require_supported("sparge", KernelRequirements((64, 64)))


def missing(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


@pytest.mark.parametrize("hint", [True, False])
def test_full_and_short_blocks_together_equal_the_reference(monkeypatch, hint):
    """Compares with a stub for its function, as documented; short blocks run in Triton's interpreter."""
    calls = []

    def stub(q, k, v, softmax_scale, block_sparse_tensors, return_lse):
        lists = block_sparse_tensors
        assert (softmax_scale, return_lse, lists.block_size) == (16**-0.5, True, (16, 16))
        assert not lists.mask_block_cnt.any()
        blocks = (t.view(-1, 16, 16) for t in (q, k, v))
        rows = lists.full_block_idx[0, 0], lists.full_block_cnt[0, 0], torch.full_like(p.kv_len, 16)
        out, lse = Packed(*blocks, *rows).attend("reference")
        calls.append(len(out))
        return out.view(q.shape), lse.view(1, 1, -1)

    cute = types.SimpleNamespace(flash_attn_func=stub)
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    sparsity = types.SimpleNamespace(BlockSparseTensorsTorch=types.SimpleNamespace)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.block_sparsity", sparsity)
    p = kinder(packed(rows=9, block_q=16, block_k=16, head_dim=16))
    p = replace(p, kv_index=p.kv_index.clamp(min=0))
    full = full_counts(p)
    assert 0 < full.sum() < p.kv_count.sum()
    with interpreted():
        other = torch.ones_like(p.q), torch.zeros(p.q.shape[:2])  # which `block_attention` merges
        out, lse = fa4.fa4_attention(inputs_of(p, kv_full=full if hint else None, partial=other))
    expected, expected_lse = p.exact()
    assert calls == ([9] if hint else [])
    assert relative_error(out, expected) < 1e-6
    torch.testing.assert_close(lse, expected_lse.float())
    assert (out[p.kv_count == 0] == 0).all()


@pytest.mark.parametrize(
    ("block", "module", "function"),
    [
        (128, "bsa_attn_sm100_blk128", "bsa_attn_sm100_blk128_fwd"),
        (64, "bsa_attn_sm120", "bsa_attn_sm120_blk64_fwd"),
    ],
)
def test_blocks_with_counts_and_lengths_equal_the_reference(monkeypatch, block, module, function):
    """Uses a stub with the function's documented layout, which leaves NaN in rows without blocks."""

    def stub(q, k, v, *, q2k_block_index, q2k_block_nums, block_sizes, **options):
        assert (q.shape, k.shape, v.shape) == ((1, 9 * block, 1, 16), *[(1, 6 * block, 1, 16)] * 2)
        assert (q2k_block_index.shape, q2k_block_nums.shape) == ((1, 1, 9, 6), (1, 1, 9))
        assert all(t.is_contiguous() for t in (q, k, v, q2k_block_index, q2k_block_nums, block_sizes))
        assert options == {"softmax_scale": 16**-0.5, "return_lse": True, "block_sparse_num": 1}
        tables = q2k_block_index[0, 0], q2k_block_nums[0, 0], block_sizes
        blocks = [t.view(-1, block, 16) for t in (q, k, v)]
        out, lse = Packed(*blocks, *tables).attend("reference")
        out[tables[1] == 0] = lse[tables[1] == 0] = torch.nan
        past = torch.arange(block) >= block_sizes[:, None]
        assert (blocks[2][past] == 0).all()  # 0 times NaN would be NaN
        return out.view(q.shape), lse.view(1, 1, -1)

    package = "flashinfer.cute_dsl.sparse"
    for name in ("flashinfer", "flashinfer.cute_dsl", package):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, f"{package}.{module}", types.SimpleNamespace(**{function: stub}))
    p = packed(rows=9, block_q=block, block_k=block, head_dim=16)
    past = torch.arange(block) >= p.kv_len[:, None]
    assert past.any()
    assert (p.kv_count == 0).any()
    out, lse = flashinfer.flashinfer_attention(inputs_of(replace(p, v=p.v.masked_fill(past[..., None], torch.nan))))
    expected, expected_lse = p.exact()
    assert relative_error(out, expected) < 1e-6
    torch.testing.assert_close(lse, expected_lse.float())
    assert (out[p.kv_count == 0] == 0).all()


RING = KernelRequirements((64, 64), 128, lse=True, ragged_rows=True, tokens=1000)
HEADS = KernelRequirements((128, 64), 128, tokens=1000)
TRAINING = KernelRequirements((128, 128), 128, lse=True, ragged_rows=True, tokens=1000, backward=True)
NARROW = KernelRequirements((64, 64), 8, lse=True, ragged_rows=True, tokens=1000)

SUPPORTED = [
    (None, torch.float32, RING, "cpu reference"),
    (None, torch.float64, TRAINING, "cpu reference"),
    ((8, 0), torch.float16, RING, "triton reference triton-int8"),
    ((8, 0), torch.bfloat16, HEADS, "triton reference sparge triton-int8"),
    ((8, 0), torch.bfloat16, TRAINING, "triton reference"),
    ((9, 0), torch.bfloat16, RING, "triton reference triton-int8"),
    ((9, 0), torch.bfloat16, replace(RING, blocks=(128, 128)), "triton reference fa4 triton-int8"),
    ((9, 0), torch.bfloat16, HEADS, "triton reference triton-int8"),
    ((9, 0), torch.bfloat16, replace(HEADS, blocks=(64, 128)), "triton reference sparge triton-int8"),
    ((9, 0), torch.bfloat16, NARROW, "triton reference triton-int8"),
    ((10, 0), torch.bfloat16, replace(RING, blocks=(256, 128)), "triton reference fa4 triton-int8"),
    ((10, 0), torch.bfloat16, replace(RING, blocks=(128, 128)), "triton reference flashinfer triton-int8"),
    ((12, 0), torch.bfloat16, RING, "triton reference flashinfer triton-int8"),
    ((12, 0), torch.bfloat16, NARROW, "triton reference triton-int8"),
]
"""Compute capability (None: the CPU), dtype, what is asked for, and the kernels that support it, best first."""


@pytest.fixture
def installed(monkeypatch):
    """Makes every kernel seem installed, on a GPU unless the test changes the capability to None."""
    for name, kernel in list(KERNELS.items()):
        monkeypatch.setitem(KERNELS, name, replace(kernel, why_unavailable=lambda: None))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.delenv("DBSP_KERNEL", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("capability", "dtype", "needs", "names"), SUPPORTED)
def test_kernels_that_support_a_request_are_found_best_first(monkeypatch, capability, dtype, needs, names):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    device = "cuda" if capability else "cpu"
    assert available(device, dtype, needs) == names.split()
    assert choose_kernel("auto", device, dtype, needs).name == names.split()[0]
    assert [choose_kernel(name, device, dtype, needs).name for name in names.split()] == names.split()


@pytest.mark.usefixtures("installed")
def test_auto_on_cuda_with_an_old_triton_raises_and_names_the_torch(monkeypatch):
    """Triton 3.2 and 3.3, of torch 2.6 and 2.7, made the first attention raise ModuleNotFoundError."""
    monkeypatch.setattr(launch, "triton_version", lambda: (3, 4))
    for name, why_unavailable in (("triton", launch.why_unavailable), ("fa4", fa4.why_unavailable)):
        monkeypatch.setitem(KERNELS, name, replace(KERNELS[name], why_unavailable=why_unavailable))
    monkeypatch.setattr("importlib.metadata.version", lambda package: "4.0.0")
    said = r"Triton 3.4 is older than 3.5; install torch 2.9 or newer"
    for name in ("auto", "triton", "fa4"):  # and never the reference
        with pytest.raises(UserError, match=said):
            choose_kernel(name, "cuda", torch.bfloat16)
    assert choose_kernel("reference", "cuda", torch.bfloat16).name == "reference"
