"""Converting masks of other projects: every form that they write, read right; everything else rejected in one line."""

from __future__ import annotations

import io
import itertools
import pickle
import zipfile
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from dbsp_cli.mask_tools.convert import (
    PARO_ORDERS,
    ConvertOptions,
    RecordingOptions,
    convert_masks,
    convert_recording,
    lut_bits,
)
from dbsp_cli.mask_tools.foreign_files import ForeignBlocks
from dbsp_core import BlockGrid, BlockMask, MaskFile
from dbsp_core.masks.steps import DenoisingStep
from dbsp_core.reports.mask_recorder import MaskRecorder, RecordSettings
from tests.support.generators import SEEDS, examples, random_bits

THW = (2, 5, 4)
GRID = BlockGrid(40, 0, 8, 8, THW)
OPTIONS = ConvertOptions(thw=THW, block_q=8, block_k=8)


def bits_of(*leading, seed=0, grid=GRID):
    return torch.from_numpy(np.random.default_rng(seed).random((*leading, grid.nq, grid.nk)) < 0.5)


def convert(tmp_path, content, options=OPTIONS, suffix=".pt"):
    source, target = tmp_path / f"in{suffix}", tmp_path / "out.safetensors"
    if suffix in (".pt", ".pth"):
        torch.save(content, source)
    elif suffix == ".npy":
        np.save(source, content.numpy())
    elif suffix == ".npz":
        np.savez(source, **{name: tensor.numpy() for name, tensor in content.items()})
    else:
        save_file(content, source)
    convert_masks(source, target, options)
    return MaskFile(target)


def holds(file, bits):
    """Returns True if the file's layers are bits[layer, head, row, column]."""
    assert file.layers == len(bits)
    return all(torch.equal(file.layer(layer).bits, layer_bits) for layer, layer_bits in enumerate(bits))


TENSORS = {
    "not contiguous": lambda masks: masks.transpose(-1, -2).contiguous().transpose(-1, -2),
    "expanded": lambda masks: masks[None].expand(1, -1, -1, -1, -1),
    "uint64": lambda masks: masks.to(torch.uint64),
    "float8, a name": lambda masks: {"mask": masks.to(torch.float8_e4m3fn)},
}
BY_LAYER = {
    "a list": list,
    "with a batch": lambda masks: [mask[None] for mask in masks],
    "names of modules": lambda masks: {f"blocks.{layer}.attn1": mask for layer, mask in enumerate(masks)},
    "any order": lambda masks: {f"layer{layer}": masks[layer] for layer in (*range(5, 11), *range(5))},
    "in a mapping": lambda masks: {"masks": dict(enumerate(masks)), "rates": torch.rand(4)},
    "a key": lambda masks: {"a key": list(masks), "other": list(~masks)},
}


class TestForms:
    @pytest.mark.parametrize("suffix", [".pt", ".pth", ".npy", ".npz", ".safetensors"])
    def test_every_kind_of_file(self, tmp_path, suffix):
        bits = bits_of(2, 3)
        content = bits if suffix in (".pt", ".npy") else {"mask": bits.half()}
        file = convert(tmp_path, content, suffix=suffix)
        assert (file.heads, file.packed, file.grid) == (3, True, GRID)
        assert holds(file, bits)

    @pytest.mark.parametrize("kind", TENSORS)
    def test_every_type_of_tensors(self, tmp_path, kind):
        bits = bits_of(2, 3)
        assert holds(convert(tmp_path, TENSORS[kind](bits.float())), bits)

    @pytest.mark.parametrize("form", BY_LAYER)
    def test_masks_of_each_layer_by_itself(self, tmp_path, form):
        """Tries 11 layers, whose names are not sorted as their numbers are."""
        bits = bits_of(11, 3)
        options = replace(OPTIONS, key=form if form == "a key" else None)
        assert holds(convert(tmp_path, BY_LAYER[form](bits), options), bits)

    def test_lists_of_key_blocks_of_each_layer_by_itself(self, tmp_path):
        bits = bits_of(2, 3)
        luts, counts = zip(*(row_lists(one, "absolute", -1) for one in bits), strict=True)
        content = {"lut": list(luts), "counts": torch.stack(counts)}
        file = convert(tmp_path, content, replace(OPTIONS, lut="absolute"))
        assert holds(file, bits)

    def test_paroattentions_plans_with_orders_per_layer_and_head(self, tmp_path):
        sparse = bits_of(4, 2, 6)
        permute = torch.stack([torch.arange(6), torch.arange(6).flip(0)])
        torch.save({"permute": permute, "empty": torch.zeros(2, 6)}, tmp_path / "permute_plan.pth")
        options = replace(OPTIONS, steps=10, orders=str(tmp_path / "permute_plan.pth"))
        file = convert(tmp_path, {"sparse": sparse, "dense_rate": torch.rand(4, 2, 6)}, options, ".pth")
        assert str(file.groups) == "0-2,3-4,5-7,8-9"
        for group, layer in itertools.product(range(4), range(2)):
            mask = file.layer(layer, group)
            assert torch.equal(mask.bits, sparse[group, layer])
            assert mask.grid.orders == tuple(PARO_ORDERS[i] for i in permute[layer].tolist())

    def test_the_numbering_of_orders_is_what_permuting_the_axes_gives(self):
        # PAROAttention permutes [F, H, W] by these axes, and flattens.
        axes = [(0, 1, 2), (0, 2, 1), (1, 2, 0), (1, 0, 2), (2, 1, 0), (2, 0, 1)]
        positions = torch.arange(40).reshape(THW)
        for number, order in enumerate(PARO_ORDERS):
            token_permutation = replace(GRID, orders=(order,)).token_permutation(order)
            assert positions.permute(axes[number]).flatten().tolist() == token_permutation.tolist()

    def test_a_short_last_block_of_a_sparse_plan_is_dense_by_default(self, tmp_path):
        grid = BlockGrid(42, 0, 8, 8)
        sparse = torch.zeros(1, 2, 6, 6, dtype=torch.bool)
        options = replace(OPTIONS, thw=None, tokens=42)
        bits = convert(tmp_path, {"sparse": sparse}, options).layer(0).bits
        assert bits[:, -1].all()
        assert bits[:, :, -1].all()
        assert int(bits.sum()) == 2 * 11
        assert torch.equal(convert(tmp_path, {"sparse": list(sparse)}, options).layer(0).bits, bits)
        assert not convert(tmp_path, {"sparse": sparse}, replace(options, tail_dense=False)).layer(0).bits.any()
        assert not convert(tmp_path, {"mask": sparse}, options).layer(0).bits.any()
        assert convert(tmp_path, {"mask": sparse}, options).grid == grid

    def test_a_recording_s_pass_with_a_dense_layer(self, tmp_path):
        recorder = MaskRecorder(RecordSettings(str(tmp_path / "r")), 2)
        masks = {}
        for step, branch in itertools.product(range(2), range(2)):
            recorder.begin(DenoisingStep(step, branch))
            sparse = BlockMask(random_bits(3, GRID, 2 * step + branch), replace(GRID, orders=("hwt", "wht", "thw")))
            masks[step, branch] = (BlockMask.dense(3, replace(GRID, orders=("thw",))), sparse)
            for layer, mask in enumerate(masks[step, branch]):
                recorder.mask_made(layer, layer, mask, False)
                recorder.mask_used(layer, layer)
        recorded, out = tmp_path / "r", tmp_path / "out.safetensors"
        convert_recording(recorded, out, RecordingOptions(step=1, branch=1))
        assert [MaskFile(out).layer(layer).fingerprint for layer in range(2)] == [
            mask.fingerprint for mask in masks[1, 1]
        ]
        with pytest.raises(ValueError, match="no mask of layer 0 at step 5"):
            convert_recording(recorded, out, RecordingOptions(step=5))


def row_lists(bits, encoding, padding):
    """Returns int64[H, nq, nk + 2] and int64[H, nq], written block by block."""
    heads, nq, nk = bits.shape
    lut = torch.full((heads, nq, nk + 2), padding)
    for head, row in np.ndindex(heads, nq):
        before = 0
        for slot, block in enumerate(torch.nonzero(bits[head, row]).flatten().tolist()):
            lut[head, row, slot] = block if encoding == "absolute" else block - before
            before = block
    return lut, bits.sum(dim=-1)


class TestLists:
    @given(SEEDS, st.sampled_from(["absolute", "delta"]), st.sampled_from([-1, 0, 7, 99]))
    @examples(60)
    def test_lists_with_counts_are_read_with_any_padding(self, seed, encoding, padding):
        bits = torch.from_numpy(np.random.default_rng(seed).random((2, 3, 7)) < 0.4)
        lut, counts = row_lists(bits, encoding, padding)
        assert torch.equal(lut_bits(lut, counts, encoding, 7), bits)
        if (encoding, padding) != ("absolute", 0):  # without counts, padding that names no block is enough
            clear = torch.full_like(counts, padding).bool() | (counts > 0)  # a row of zeros alone reads as block 0
            assert torch.equal(lut_bits(lut, None, encoding, 7)[clear], bits[clear])


@st.composite
def joined(draw):
    text, video = draw(st.integers(0, 20)), draw(st.integers(1, 40))
    return BlockGrid(text + video, text, draw(st.integers(1, 9)), draw(st.integers(1, 9)))


class TestTextBlocks:
    @given(joined(), SEEDS)
    @examples(80)
    def test_blocks_that_run_on_cover_every_pair_of_tokens_that_they_did(self, grid, seed):
        nq, nk = -(-grid.tokens // grid.block_q), -(-grid.tokens // grid.block_k)
        bits = torch.from_numpy(np.random.default_rng(seed).random((1, nq, nk)) < 0.3)
        fitted = ForeignBlocks(grid, joined=True).fit(bits)
        tokens = np.arange(grid.tokens)
        old = bits[0][tokens // grid.block_q][:, tokens // grid.block_k]
        new = fitted[0][grid.q_axis.block_of][:, grid.k_axis.block_of]
        assert not (old & ~new).any()
        for i, j in np.ndindex(grid.nq, grid.nk):  # and no block more than that takes
            rows, columns = grid.q_axis.block_of == i, grid.k_axis.block_of == j
            assert bool(fitted[0, i, j]) == bool(old[rows][:, columns].any())

    def test_paroattentions_cogvideox_plan_of_video_blocks_after_joined_text(self):
        # 226 + 17550 tokens in 278 blocks, 274 of them in the plan; the fourth holds 34 of text, 30 of video.
        grid = BlockGrid(17776, 226, 64, 64)
        plan = torch.zeros(1, 274, 274, dtype=torch.bool)
        plan[0, 0, 1] = True  # tokens 256…319 attend to tokens 320…383
        fitted = ForeignBlocks.find(274, 274, grid).fit(plan)
        assert (grid.nq, fitted.shape) == (279, (1, 279, 279))
        rows, columns = (grid.q_axis.block_of[[first, last]] for first, last in ((256, 319), (320, 383)))
        # Block 4 starts at token 226 and shares 30 tokens with the plan's text: dense, as in PAROAttention.
        dense = torch.zeros(279, 279, dtype=torch.bool)
        dense[:5] = dense[:, :5] = True
        dense[rows[0] : rows[1] + 1, columns[0] : columns[1] + 1] = True
        assert torch.equal(fitted[0], dense)


class Evil:
    """Unpickling it would run a program."""

    def __reduce__(self):
        return (exec, ("raise SystemExit('unpickled')",))


def npy_header(*shape):
    """Returns the start of an .npy file of bools."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|b1", "fortran_order": False, "shape": shape})
    return header.getvalue()


def damaged(kind, path):
    """Writes a file whose objects would run a program, or whose header or indices are wrong."""
    if kind == "header":
        path.write_bytes(b"\x93NUMPY\x01\x00\x0c\x00{'descr': (\n")
    elif kind == "torch":
        torch.save({"mask": Evil()}, path)
    elif kind == "size":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("mask.npy", npy_header(9, 3, 5, 5) + bytes(150))
    elif kind == "raw":
        path.write_bytes(pickle.dumps({"mask": Evil()}, protocol=2))
    elif path.suffix == ".npy":
        np.save(path, np.array([Evil()], dtype=object))
    else:
        np.savez(path, mask=np.array([Evil()], dtype=object))


def assert_rejected(path, message):
    """Checks that a file is rejected in one line, and that nothing is written."""
    target = path.with_name("out.safetensors")
    with pytest.raises(ValueError, match=message) as raised:
        convert_masks(path, target, OPTIONS)
    assert "\n" not in str(raised.value)
    assert not target.exists()


class TestRejected:
    @pytest.mark.parametrize(
        ("kind", "suffix"),
        [
            ("torch", ".pt"),
            *(("numpy", suffix) for suffix in (".npy", ".npz")),
            ("raw", ".safetensors"),
            ("header", ".npy"),
            ("size", ".npz"),
        ],
    )
    def test_pickles_are_not_run_and_damaged_files_are_rejected(self, tmp_path, kind, suffix):
        path = tmp_path / f"in{suffix}"
        damaged(kind, path)
        assert_rejected(path, "cannot be read without unpickling objects.*; save plain tensors")

    @pytest.mark.parametrize(
        ("content", "changes", "message"),
        [
            (bits_of(2, 3) * 2, {}, r"values other than 0 and 1 \(up to 2\).*lut="),
            (bits_of(3).to_sparse(), {}, "has no dense tensors in it"),
            ({"a": bits_of(3), "b": bits_of(3)}, {}, r"clearly the masks \(a \[3, 5, 5\], b \[3, 5, 5\]\).*key="),
            ({"a": bits_of(3)}, {"key": "b"}, "has no tensor 'b'; key can be one of a"),
            (dict.fromkeys(range(1, 4), bits_of(3)), {}, "name it with key=NAME, or stack the masks of all layers"),
            ({"a": "text"}, {}, "has no dense tensors in it"),
            (bits_of(2, 2, 3), {}, "2 step groups; set steps=50"),
            (bits_of(2, 2, 3), {"groups": "0-4,5-7,8-"}, "names 3 groups, but the masks have 2"),
            (bits_of(2, 3), {"steps": 50}, "have no step groups; remove"),
            (bits_of(3), {"orders": "hwd"}, "unknown token order 'hwd'"),
            (bits_of(3), {"orders": "hwt,thw"}, "names 2 token orders, but the masks have 3 heads"),
            (bits_of(3), {"orders": "hwt", "thw": None, "tokens": 40}, "need thw"),
            ({"mask": bits_of(3), "permute": torch.tensor([0, 1, 6])}, {}, "must be 0 to 5 .*, got 6"),
            (bits_of(3), {"thw": (2, 5, 5)}, "masks have 5×5 blocks; 50 tokens"),
            (bits_of(3), {"groups": "0-", "steps": 4}, "remove one of them"),
            (bits_of(3), {"lut": "relative"}, "use one of absolute, delta"),
            ({"lut": bits_of(3).int(), "counts": torch.zeros(2, 5)}, {"lut": "absolute"}, "counts of shape"),
        ],
    )
    def test_what_does_not_fit_raises_one_line_and_writes_nothing(self, tmp_path, content, changes, message):
        with pytest.raises(ValueError, match=message) as raised:
            convert(tmp_path, content, replace(OPTIONS, **changes))
        assert "\n" not in str(raised.value)
        assert {path.name for path in tmp_path.iterdir()} <= {"in.pt"}
