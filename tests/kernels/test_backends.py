"""Kernels of others, on this side of their calls: what they are given, and what is made of their answers. No GPU."""

from __future__ import annotations

import importlib.util
import sys
import types
from dataclasses import replace

import pytest
import torch

from dbsp_kernels import KERNELS, KernelInputs, KernelRequirements, choose_kernel
from dbsp_kernels.backends import fa4, flashinfer, sparge
from dbsp_kernels.errors import install_command
from tests.kernels.packed_inputs import Packed, full_counts, kinder, packed, relative_error
from tests.support.interpreter import interpreted


def inputs_of(p: Packed, **options) -> KernelInputs:
    return KernelInputs(*vars(p).values(), p.q.shape[-1] ** -0.5, **options)


def supported_here(monkeypatch, name: str, capability: tuple[int, int]) -> None:
    """Makes such a GPU and the kernel seem to be installed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setitem(KERNELS, name, replace(KERNELS[name], why_unavailable=lambda: None))


class TestSparge:
    def test_whole_heads_with_their_mask(self, monkeypatch):
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

        module = types.ModuleType("spas_sage_attn")
        module.block_sparse_sage2_attn_cuda = stub
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


class TestWhatIsNotThere:
    @pytest.mark.parametrize("name", ["fa4", "flashinfer", "sparge"])
    def test_missing_package_raises_with_an_install_command(self, monkeypatch, name):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        monkeypatch.setattr(importlib.metadata, "version", missing)
        with pytest.raises(ValueError, match=f"kernel '{name}' cannot be used here: .*(pip install|build it)"):
            choose_kernel(name, "cuda", torch.bfloat16)

    def test_build_whose_compiled_module_does_not_load_is_unavailable(self, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        monkeypatch.setitem(sys.modules, "spas_sage_attn", types.ModuleType("package"))
        monkeypatch.setitem(sys.modules, "spas_sage_attn._qattn", None)
        assert "compiled module cannot be loaded" in sparge.why_unavailable()

    def test_build_for_other_gpus_is_unavailable(self, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        monkeypatch.setitem(sys.modules, "spas_sage_attn", types.ModuleType("package"))
        monkeypatch.setitem(sys.modules, "spas_sage_attn._qattn", types.ModuleType("kernels"))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        assert "without its kernels for Hopper" in sparge.why_unavailable()

    @pytest.mark.parametrize(
        ("name", "capability", "needs", "message"),
        [
            ("sparge", (12, 0), KernelRequirements(), r"compute capability 8.0, .*, 9.0; cuda has 12.0"),
            ("fa4", (9, 0), KernelRequirements((64, 64), 128), r"blocks of 128×128, not 64×64"),
            ("fa4", (10, 0), KernelRequirements((128, 128), 128), r"blocks of 256×128, not 128×128"),
            ("flashinfer", (10, 0), KernelRequirements((64, 64), 128), r"blocks of 128×128, not 64×64"),
            ("flashinfer", (12, 0), KernelRequirements((128, 128), 128), r"blocks of 64×64, not 128×128"),
            ("flashinfer", (12, 0), KernelRequirements((64, 64), 64), r"head dims 128, not 64"),
            ("flashinfer", (9, 0), KernelRequirements((64, 64), 128), r"10.0, 10.3, 12.0, 12.1; cuda has 9.0"),
            (
                "fa4",
                (12, 0),
                KernelRequirements((128, 128), 128),
                r"compute capability 9.0, 10.0, 10.3; cuda has 12.0",
            ),
        ],
    )
    def test_unsupported_request_is_rejected(self, monkeypatch, name, capability, needs, message):
        supported_here(monkeypatch, name, capability)
        with pytest.raises(ValueError, match=f"kernel '{name}' cannot be used here: .*{message}.*; use "):
            choose_kernel(name, "cuda", torch.bfloat16, needs)

    @pytest.mark.parametrize(("name", "capability"), [("fa4", (9, 0)), ("flashinfer", (10, 0))])
    def test_installed_it_is_taken_by_name_and_auto_takes_triton(self, monkeypatch, name, capability):
        supported_here(monkeypatch, name, capability)
        monkeypatch.setitem(KERNELS, "triton", replace(KERNELS["triton"], why_unavailable=lambda: None))
        monkeypatch.delenv("DBSP_KERNEL", raising=False)
        needs = KernelRequirements((128, 128), 128, lse=True, ragged_rows=True)
        assert choose_kernel(name, "cuda", torch.bfloat16, needs).name == name
        assert choose_kernel("auto", "cuda", torch.bfloat16, needs).name == "triton"


def missing(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


class TestFa4:
    @pytest.mark.parametrize("hint", [True, False])
    def test_full_and_short_blocks_together_equal_the_reference(self, monkeypatch, hint):
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

        cute = types.ModuleType("flash_attn.cute")
        cute.flash_attn_func = stub
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


class TestFlashInfer:
    @pytest.mark.parametrize(
        ("block", "module", "function"),
        [
            (128, "bsa_attn_sm100_blk128", "bsa_attn_sm100_blk128_fwd"),
            (64, "bsa_attn_sm120", "bsa_attn_sm120_blk64_fwd"),
        ],
    )
    def test_blocks_with_counts_and_lengths_equal_the_reference(self, monkeypatch, block, module, function):
        """Uses a stub with the function's documented layout, which leaves NaN in rows without blocks."""

        def stub(
            q, k, v, *, q2k_block_index, q2k_block_nums, block_sparse_num, block_sizes, softmax_scale, return_lse
        ):
            assert q.shape == (1, 9 * block, 1, 16)
            assert k.shape == v.shape == (1, 6 * block, 1, 16)
            assert (q2k_block_index.shape, q2k_block_nums.shape) == ((1, 1, 9, 6), (1, 1, 9))
            assert all(t.is_contiguous() for t in (q, k, v, q2k_block_index, q2k_block_nums, block_sizes))
            assert (softmax_scale, return_lse, block_sparse_num) == (16**-0.5, True, 1)
            tables = q2k_block_index[0, 0], q2k_block_nums[0, 0], block_sizes
            blocks = [t.view(-1, block, 16) for t in (q, k, v)]
            out, lse = Packed(*blocks, *tables).attend("reference")
            out[q2k_block_nums[0, 0] == 0] = torch.nan
            lse[q2k_block_nums[0, 0] == 0] = torch.nan
            past = torch.arange(block) >= block_sizes[:, None]
            assert (blocks[2][past] == 0).all()  # 0 times NaN would be NaN
            return out.view(q.shape), lse.view(1, 1, -1)

        package = "flashinfer.cute_dsl.sparse"
        for name in ("flashinfer", "flashinfer.cute_dsl", package):
            monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        of_block = types.ModuleType(f"{package}.{module}")
        setattr(of_block, function, stub)
        monkeypatch.setitem(sys.modules, of_block.__name__, of_block)
        p = packed(rows=9, block_q=block, block_k=block, head_dim=16)
        past = torch.arange(block) >= p.kv_len[:, None]
        assert past.any()
        assert (p.kv_count == 0).any()
        out, lse = flashinfer.flashinfer_attention(
            inputs_of(replace(p, v=p.v.masked_fill(past[..., None], torch.nan)))
        )
        expected, expected_lse = p.exact()
        assert relative_error(out, expected) < 1e-6
        torch.testing.assert_close(lse, expected_lse.float())
        assert (out[p.kv_count == 0] == 0).all()

    def test_nothing_to_attend_to_calls_nothing(self):
        p = packed(rows=3, block_q=64, block_k=64)
        out, lse = flashinfer.flashinfer_attention(inputs_of(replace(p, kv_index=p.kv_index[:, :0])))
        assert (out == 0).all()
        assert (lse == -torch.inf).all()

    def test_incomplete_installation_is_unavailable(self, monkeypatch, tmp_path):
        (tmp_path / "flashinfer").mkdir()
        (tmp_path / "flashinfer/__init__.py").touch()
        monkeypatch.syspath_prepend(tmp_path)
        assert (
            f"no block-sparse attention with counts; {install_command('flashinfer')}" in flashinfer.why_unavailable()
        )
        (tmp_path / "flashinfer/cute_dsl/sparse").mkdir(parents=True)
        (tmp_path / "flashinfer/cute_dsl/sparse/bsa_attn_sm120.py").touch()
        assert flashinfer.why_unavailable() is None
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        for capability, missing in (((12, 0), False), ((10, 0), True)):
            monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, one=capability: one)
            assert ("--no-deps quack-kernels" in str(flashinfer.why_unavailable())) == missing
