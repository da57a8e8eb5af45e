"""Kernels of others, on this side of their calls: what they are given, and what is made of their answers. No GPU."""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dbsp_kernels import KERNELS, BackwardInputs, DenseHeadLayout, KernelInputs, KernelRequirements, choose_kernel
from dbsp_kernels.backends import cudnn, fa4, fastvideo, flex, sparge
from tests.kernels.packed_inputs import Packed, full_counts, kinder, packed, relative_error
from tests.support.interpreter import interpreted
from tests.support.repository import ROOT


def inputs_of(p: Packed, **options) -> KernelInputs:
    return KernelInputs(*vars(p).values(), p.q.shape[-1] ** -0.5, **options)


def served_here(monkeypatch, name: str, capability: tuple[int, int]) -> None:
    """As if there were such a GPU, and the kernel installed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setitem(KERNELS, name, replace(KERNELS[name], why_unavailable=lambda: None))


class TestFlex:
    def test_its_block_lists_are_the_rows(self):
        """On the CPU FlexAttention ignores them, so they are read back; on a GPU it is compared with the reference."""
        p = kinder(packed(rows=5, blocks=6, block_q=8, block_k=8, seed=1))
        full = full_counts(p)
        assert 0 < full.sum() < p.kv_count.sum()
        mask = flex.packed_block_mask(p.kv_index.clamp(min=0), p.kv_count, p.kv_len, full, (8, 8))
        wanted = torch.zeros(5, 6, dtype=torch.bool)
        for row, count in enumerate(p.kv_count.tolist()):
            wanted[row, p.kv_index[row, :count].long()] = True
        partial_lists = zip(mask.kv_num_blocks[0, 0].tolist(), mask.kv_indices[0, 0], strict=True)
        full_lists = zip(mask.full_kv_num_blocks[0, 0].tolist(), mask.full_kv_indices[0, 0], strict=True)
        for lists, is_full in ((partial_lists, False), (full_lists, True)):
            for row, (count, entries) in enumerate(lists):
                named = wanted[row] & ((p.kv_len == 8) == is_full)
                assert sorted(entries[:count].tolist()) == named.nonzero().flatten().tolist()
        keys = torch.arange(6 * 8)
        assert torch.equal(mask.mask_mod(0, 0, keys * 0, keys), keys % 8 < p.kv_len.repeat_interleave(8))

    def test_past_its_limit_of_variants_it_raises_and_never_computes_dense(self):
        """torch itself would run FlexAttention eagerly, which ignores lists of blocks.

        In a process of its own: what dynamo leaves behind changes which tensors other tests see alive.
        """
        line = [sys.executable, "-m", "tests.kernels.flex_limit"]
        done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


class TestSparge:
    def test_whole_heads_with_their_mask(self, monkeypatch):
        """Against a stand-in for SpargeAttn's function: what arrives there is heads, tokens and a block mask."""
        heads, tokens, block_q, block_k, width = 3, 29, 8, 6, 16
        generator = torch.Generator().manual_seed(0)
        bits = torch.rand(heads, 4, 5, generator=generator) < 0.5
        bits[1, 2] = False
        poison = torch.nan

        def stand_in(q, k, v, mask_id, scale, tensor_layout, output_dtype):
            assert (q.shape, mask_id.shape, tensor_layout) == ((1, heads, tokens, width), (1, heads, 4, 5), "HND")
            assert torch.equal(mask_id[0].bool(), bits)
            allowed = bits.repeat_interleave(block_q, 1).repeat_interleave(block_k, 2)[:, :tokens, :tokens]
            out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed[None], scale=scale)
            return out.masked_fill(~allowed.any(-1)[None, ..., None], poison).to(output_dtype)

        module = types.ModuleType("spas_sage_attn")
        module.block_sparse_sage2_attn_cuda = stand_in
        monkeypatch.setitem(sys.modules, "spas_sage_attn", module)
        q = torch.randn(heads * 4, block_q, width, generator=generator)
        k, v = torch.randn(2, heads * 5, block_k, width, generator=generator)
        count = bits.sum(-1).flatten().int()
        index = torch.argsort(~bits, dim=-1, stable=True) + 5 * torch.arange(heads)[:, None, None]
        length = torch.tensor([6, 6, 6, 6, 5] * heads).int()
        p = Packed(q, k, v, index.flatten(0, 1).int(), count, length)
        out, lse = sparge.sparge_attention(
            KernelInputs(*vars(p).values(), width**-0.5, head_layout=DenseHeadLayout(heads, tokens))
        )
        expected = p.exact()[0].unflatten(0, (heads, 4)).flatten(1, 2)[:, :tokens]
        torch.testing.assert_close(out.view(heads, -1, width)[:, :tokens], expected.float())
        assert (out[6] == 0).all()
        assert lse.isnan().all()


class TestWhatIsNotThere:
    @pytest.mark.parametrize("name", ["cudnn", "fa4", "fastvideo", "sparge"])
    def test_what_is_not_installed_says_how_to(self, monkeypatch, name):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        monkeypatch.setattr(importlib.metadata, "version", missing)
        with pytest.raises(ValueError, match=f"kernel '{name}' cannot be used here: .*(pip install|build it)"):
            choose_kernel(name, "cuda", torch.bfloat16)

    def test_the_page_says_how_to_build_spargeattn_as_the_message_does(self, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        assert sparge.INSTALL in sparge.why_unavailable()
        assert f"\n{sparge.INSTALL}\n" in (ROOT / "docs" / "kernels.md").read_text()

    def test_a_wheel_of_another_version(self, monkeypatch):
        monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.31.2")
        assert "1.31.2 has no block-sparse attention" in cudnn.why_unavailable()

    @pytest.mark.parametrize(
        ("module", "why"), [("spas_sage_attn._qattn", sparge), ("fastvideo_kernel._C", fastvideo)]
    )
    def test_a_wheel_whose_compiled_module_does_not_load(self, monkeypatch, module, why):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        monkeypatch.setitem(sys.modules, module.partition(".")[0], types.ModuleType("package"))
        monkeypatch.setitem(sys.modules, module, None)
        assert "compiled module cannot be loaded" in why.why_unavailable()

    def test_a_build_for_other_gpus(self, monkeypatch):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
        monkeypatch.setitem(sys.modules, "spas_sage_attn", types.ModuleType("package"))
        monkeypatch.setitem(sys.modules, "spas_sage_attn._qattn", types.ModuleType("kernels"))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        assert "without its kernels for Hopper" in sparge.why_unavailable()

    @pytest.mark.parametrize(
        ("name", "capability", "needs", "complaint"),
        [
            ("sparge", (12, 0), KernelRequirements(), r"compute capability 8.0, .*, 9.0; cuda has 12.0"),
            ("cudnn", (8, 0), KernelRequirements(), r"compute capability 9.0, .*; cuda has 8.0"),
            ("cudnn", (9, 0), KernelRequirements((64, 128), 128), r"blocks of 64×64, 128×128, not 64×128"),
            ("cudnn", (10, 0), KernelRequirements((64, 64), 64), r"blocks of 128×128, not 64×64"),
            ("cudnn", (12, 0), KernelRequirements((64, 64), 64), r"serves no torch.bfloat16 with head dim 64 here"),
            ("cudnn", (9, 0), KernelRequirements((64, 64), 72), r"head dims 64 or 96 or 128, not 72"),
            ("fa4", (9, 0), KernelRequirements((64, 64), 128), r"blocks of 128×128, not 64×64"),
            ("fa4", (10, 0), KernelRequirements((128, 128), 128), r"blocks of 256×128, not 128×128"),
            (
                "fa4",
                (12, 0),
                KernelRequirements((128, 128), 128),
                r"compute capability 9.0, 10.0, 10.3; cuda has 12.0",
            ),
            ("fastvideo", (9, 0), KernelRequirements((128, 128), 128), r"blocks of 64×64, not 128×128"),
        ],
    )
    def test_what_a_kernel_cannot_serve(self, monkeypatch, name, capability, needs, complaint):
        served_here(monkeypatch, name, capability)
        with pytest.raises(ValueError, match=f"kernel '{name}' cannot be used here: .*{complaint}.*; use "):
            choose_kernel(name, "cuda", torch.bfloat16, needs)

    @pytest.mark.parametrize("name", ["cudnn", "fastvideo"])
    def test_they_are_taken_by_name_only(self, monkeypatch, name):
        served_here(monkeypatch, name, (9, 0))
        needs = KernelRequirements((64, 64), 128, lse=True, ragged_rows=True)
        assert choose_kernel(name, "cuda", torch.bfloat16, needs).name == name
        monkeypatch.delenv("DBSP_KERNEL", raising=False)
        assert choose_kernel("auto", "cuda", torch.bfloat16, needs).name != name

    def test_fa4_is_preferred_where_it_serves(self, monkeypatch):
        served_here(monkeypatch, "fa4", (9, 0))
        monkeypatch.delenv("DBSP_KERNEL", raising=False)
        needs = {rows: KernelRequirements((rows, rows), 128, lse=True, ragged_rows=True) for rows in (64, 128)}
        assert choose_kernel("auto", "cuda", torch.bfloat16, needs[128]).name == "fa4"
        assert choose_kernel("auto", "cuda", torch.bfloat16, needs[64]).name == "triton"
        assert choose_kernel("auto", "cuda", torch.bfloat16, replace(needs[128], backward=True)).name == "triton"


def missing(name: str) -> str:
    raise importlib.metadata.PackageNotFoundError(name)


class TestFastvideo:
    def test_its_contract_and_ours(self, monkeypatch):
        """Against a stand-in for its operator, with its habits: a block at least, lse times −√D, one fixed scale."""

        def stand_in(q, k, v, index, count, length):
            assert (count >= 1).all()
            packed = Packed(*(t.view(-1, 16, 32) for t in (q, k, v)), index[0, 0], count[0, 0], length)
            out, lse = packed.attend("reference")
            return out.view(q.shape), (lse * -(32**0.5)).view(1, 1, -1, 1)

        operators = types.SimpleNamespace(block_sparse_fwd=stand_in)
        monkeypatch.setitem(sys.modules, "fastvideo_kernel", types.ModuleType("package"))
        monkeypatch.setitem(sys.modules, "fastvideo_kernel._C", types.SimpleNamespace(fastvideo_kernel_ops=operators))
        p = packed(rows=9, block_q=16, block_k=16, width=32)
        assert (p.kv_count == 0).any()
        for scale in (32**-0.5, 0.4):
            out, lse = fastvideo.fastvideo_attention(KernelInputs(*vars(p).values(), scale))
            expected, expected_lse = p.exact(scale)
            torch.testing.assert_close(out, expected.float())
            torch.testing.assert_close(lse, expected_lse.float())


@functools.cache
def cudnn_api():
    """The installed wheel's own checks of arguments, without the compiled modules that it imports around them."""
    spec = importlib.util.find_spec("cudnn")
    folder = Path(spec.submodule_search_locations[0])
    for name, path in (("cudnn", folder), ("cudnn.block_sparse_attention", folder / "block_sparse_attention")):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [str(path)]
    sys.modules["cudnn.api_base"] = types.SimpleNamespace(TupleDict=dict)
    return importlib.import_module("cudnn.block_sparse_attention.api")


@pytest.mark.skipif(importlib.util.find_spec("cudnn") is None, reason="needs the wheel of nvidia-cudnn-frontend")
class TestCudnnsOwnChecks:
    """Our calls through the installed wheel's signature and checks, with tensors that have no memory."""

    @pytest.fixture
    def launched(self, monkeypatch):
        """What passes its checks on the way to its kernels, by their names."""
        calls = {}

        def launcher(name, results):
            def launch(*args, **kwargs):
                calls[name] = (args, kwargs)
                return results(*args)

            return launch

        kernels = types.SimpleNamespace(
            bsa_attn_fwd=launcher("forward", lambda q, *_: (q, q.select(-1, 0).float())),
            bsa_attn_fwd_blk64_cutedsl=launcher("forward", lambda q, *_: (q, q.select(-1, 0).float())),
            bsa_attn_bwd=launcher("backward", lambda do, q, k, v, *_: (q, k, v)),
        )
        api = cudnn_api()
        monkeypatch.setitem(sys.modules, "cudnn.block_sparse_attention._interface", kernels)
        monkeypatch.setattr(sys.modules["cudnn.block_sparse_attention"], "_interface", kernels, raising=False)
        monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
        return api, calls

    @pytest.mark.parametrize("arch", sorted(cudnn.ARCHS))
    def test_forward(self, monkeypatch, launched, arch):
        api, calls = launched
        monkeypatch.setattr(api, "_device_arch", lambda tensor: arch)
        served = {
            (block, width, dtype)
            for dtype in (torch.float16, torch.bfloat16)
            for width in (64, 96, 128)
            for block, _ in cudnn.blocks(arch, dtype, width)
        }
        for block in (64, 128):
            for width in (64, 96, 128):
                for dtype in (torch.float16, torch.bfloat16):
                    for hint in (False, True):
                        inputs = on_no_gpu(block, width, dtype, hint)
                        arguments = cudnn.forward_arguments(inputs)
                        if (block, width, dtype) not in served:
                            with pytest.raises(NotImplementedError):
                                api.block_sparse_attention_forward(**arguments)
                            continue
                        result = api.block_sparse_attention_forward(**arguments)
                        assert result["o_tensor"].view(inputs.q.shape).shape == inputs.q.shape
                        assert result["lse_tensor"].view(inputs.q.shape[:2]).shape == inputs.q.shape[:2]
                        args, kwargs = calls["forward"]
                        given = {**dict(zip(("q", "k", "v", "index"), args, strict=False)), **kwargs}
                        assert given["allow_empty_block_nums"] is True
                        assert given["softmax_scale"] == width**-0.5

    @pytest.mark.parametrize("arch", [90, 100])
    @pytest.mark.parametrize("block", [64, 128])
    def test_backward(self, monkeypatch, launched, arch, block):
        api, calls = launched
        monkeypatch.setattr(api, "_device_arch", lambda tensor: arch)
        inputs = on_no_gpu(block, 128, torch.bfloat16, True)
        lse = inputs.q.select(-1, 0).float()
        arguments = cudnn.backward_arguments(BackwardInputs(inputs, inputs.q, inputs.q, lse, pytest.fail))
        result = api.block_sparse_attention_backward(**arguments)
        assert calls.keys() == {"backward"}
        for name, like in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v)):
            assert result[f"d{name}_tensor"].view(like.shape).shape == like.shape

    def test_its_checks_would_find_a_wrong_dtype(self, monkeypatch, launched):
        api, _ = launched
        monkeypatch.setattr(api, "_device_arch", lambda tensor: 90)
        inputs = on_no_gpu(64, 128, torch.bfloat16, True)
        wrong = replace(inputs, kv_index=inputs.kv_index.long())
        with pytest.raises(ValueError, match="int32"):
            api.block_sparse_attention_forward(**cudnn.forward_arguments(wrong))


def on_no_gpu(block: int, width: int, dtype: torch.dtype, hint: bool) -> KernelInputs:
    with FakeTensorMode():
        tensors = [torch.empty(n, block, width, dtype=dtype, device="cuda") for n in (5, 7, 7)]
        tables = [torch.empty(shape, dtype=torch.int32, device="cuda") for shape in ((5, 6), (5,), (7,), (5,))]
    return KernelInputs(*tensors, *tables[:3], width**-0.5, tables[3] if hint else None)


class TestFa4:
    @pytest.mark.parametrize("hint", [True, False])
    def test_its_full_blocks_and_our_short_ones_are_the_whole(self, monkeypatch, hint):
        """Against a stand-in for its function, by its documented meaning; short blocks run in Triton's interpreter."""
        calls = []

        def stand_in(q, k, v, softmax_scale, block_sparse_tensors, return_lse):
            lists = block_sparse_tensors
            assert (softmax_scale, return_lse, lists.block_size) == (16**-0.5, True, (16, 16))
            assert not lists.mask_block_cnt.any()
            blocks = (t.view(-1, 16, 16) for t in (q, k, v))
            rows = lists.full_block_idx[0, 0], lists.full_block_cnt[0, 0], torch.full_like(p.kv_len, 16)
            out, lse = Packed(*blocks, *rows).attend("reference")
            calls.append(len(out))
            return out.view(q.shape), lse.view(1, 1, -1)

        cute = types.ModuleType("flash_attn.cute")
        cute.flash_attn_func = stand_in
        monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
        monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
        sparsity = types.SimpleNamespace(BlockSparseTensorsTorch=types.SimpleNamespace)
        monkeypatch.setitem(sys.modules, "flash_attn.cute.block_sparsity", sparsity)
        p = kinder(packed(rows=9, block_q=16, block_k=16, width=16))
        p = replace(p, kv_index=p.kv_index.clamp(min=0))
        full = full_counts(p)
        assert 0 < full.sum() < p.kv_count.sum()
        with interpreted():
            out, lse = fa4.fa4_attention(inputs_of(p, kv_full=full if hint else None))
        expected, expected_lse = p.exact()
        assert calls == ([9] if hint else [])
        assert relative_error(out, expected) < 1e-6
        torch.testing.assert_close(lse, expected_lse.float())
        assert (out[p.kv_count == 0] == 0).all()


class TestCudnn:
    @pytest.mark.parametrize("hint", [True, False])
    def test_its_full_blocks_and_our_short_ones_are_the_whole(self, monkeypatch, hint):
        """Against a stand-in for its forward, by its documented meaning; short blocks run in Triton's interpreter."""

        def stand_in(
            q_tensor, k_tensor, v_tensor, q2k_block_index, q2k_block_nums, block_sizes, sparse_block_size, **options
        ):
            assert options == {"allow_empty_block_nums": True, "softmax_scale": 16**-0.5}
            blocks = (t.view(-1, sparse_block_size, 16) for t in (q_tensor, k_tensor, v_tensor))
            length = torch.full_like(p.kv_len, sparse_block_size) if block_sizes is None else block_sizes
            out, lse = Packed(*blocks, q2k_block_index[0, 0], q2k_block_nums[0, 0], length).attend("reference")
            return {"o_tensor": out.view(q_tensor.shape), "lse_tensor": lse.view(1, 1, -1)}

        package = types.ModuleType("cudnn")
        package.block_sparse_attention = types.SimpleNamespace(block_sparse_attention_forward=stand_in)
        monkeypatch.setitem(sys.modules, "cudnn", package)
        p = kinder(packed(rows=9, block_q=16, block_k=16, width=16))
        p = replace(p, kv_index=p.kv_index.clamp(min=0))
        full = full_counts(p)
        assert 0 < full.sum() < p.kv_count.sum()
        with interpreted():
            out, lse = cudnn.cudnn_attention(inputs_of(p, kv_full=full if hint else None))
        expected, expected_lse = p.exact()
        assert relative_error(out, expected) < 1e-6
        torch.testing.assert_close(lse, expected_lse.float())
        assert (out[p.kv_count == 0] == 0).all()
