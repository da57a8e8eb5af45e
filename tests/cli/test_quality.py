"""The quality guard: it reports the true error, and separates right masks from wrong ones."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given

from dbsp_cli.mask_tools.quality import DEFAULT_LIMIT, smooth_tokens, sparse_errors
from dbsp_core import BlockGrid, BlockMask
from dbsp_core.sources import MaskRequest, WindowSource
from tests.support.generators import SEEDS, examples, random_bits
from tests.support.oracle import dense_attention

THW = (4, 12, 16)
TOKENS = 768
LOCAL = WindowSource(16, 16, (3, 5, 5)).mask(MaskRequest(0, 2, THW))


@given(SEEDS)
@examples(15)
def test_the_error_is_that_of_the_oracle_for_any_orders(seed):
    grid = BlockGrid(47, 5, 4, 3, (2, 3, 7), ("hwt", "thw", "wth"))
    mask = BlockMask(random_bits(3, grid, seed, 0.7), grid)
    generator = torch.Generator().manual_seed(seed % 2**31)
    q, k, v = (torch.randn(1, 3, 47, 8, generator=generator) for _ in range(3))
    sparse = dense_attention(q, k, v, mask, queries=torch.arange(47))
    dense = dense_attention(q, k, v, BlockMask.dense(3, grid), queries=torch.arange(47))
    for one in sparse_errors(q, k, v, mask, queries=47):
        expected = (sparse - dense)[0, one.head].abs().sum() / dense[0, one.head].abs().sum()
        assert one.error == pytest.approx(float(expected), rel=1e-4, abs=1e-6)
        assert one.density == pytest.approx(float(mask.bits[one.head].float().mean()))


def test_one_head_of_tokens_supports_every_head_and_heads_can_be_chosen():
    grid = BlockGrid(47, 5, 4, 3, (2, 3, 7))
    mask = BlockMask(random_bits(3, grid, 1), grid)
    tokens = smooth_tokens((2, 3, 7), 5)
    everyone = sparse_errors(*(t.expand(1, 3, 47, -1) for t in tokens), mask)
    assert sparse_errors(*tokens, mask) == everyone
    assert sparse_errors(*tokens, mask, heads=[2, 0]) == [everyone[2], everyone[0]]


@pytest.mark.parametrize("seed", range(3))
def test_local_masks_pass_and_the_same_blocks_elsewhere_or_in_another_order_do_not(seed):
    tokens = smooth_tokens(THW, seed=seed)

    def worst(bits, order="thw"):
        mask = BlockMask(bits, replace(LOCAL.grid, orders=(order,)))
        return max(one.error for one in sparse_errors(*tokens, mask, seed=seed))

    shuffled = LOCAL.bits[:, torch.from_numpy(np.random.default_rng(seed).permutation(LOCAL.grid.nq))]
    assert LOCAL.density < 0.5
    assert worst(LOCAL.bits) < DEFAULT_LIMIT / 2
    assert worst(shuffled) > DEFAULT_LIMIT
    assert worst(LOCAL.bits, "wth") > DEFAULT_LIMIT


def test_tokens_are_smooth_seeded_and_of_their_own_in_each_head():
    q, k, v = smooth_tokens(THW, text_tokens=3, heads=2, head_dim=16, seed=4)
    assert q.shape == k.shape == v.shape == (1, 2, 3 + TOKENS, 16)
    again = smooth_tokens(THW, text_tokens=3, heads=2, head_dim=16, seed=4)
    assert all(torch.equal(a, b) for a, b in zip((q, k, v), again, strict=True))
    assert not torch.equal(q[0, 0], q[0, 1])
    assert not torch.equal(q, smooth_tokens(THW, text_tokens=3, heads=2, head_dim=16, seed=5)[0])
    for tensor in (q, v):
        video = tensor[0, 0, 3:].reshape(*THW, 16)
        for axis, size in enumerate(THW):
            near = torch.cosine_similarity(video, video.roll(1, axis), dim=-1).narrow(axis, 1, size - 1).mean()
            assert near > 0.5
        far = torch.cosine_similarity(video, video.flip((0, 1, 2)), dim=-1)
        assert far.abs().mean() < 0.35


@pytest.mark.parametrize(
    ("q", "k", "message"),
    [
        ((1, 2, 5, 4), (1, 2, 5, 4), r"does not fit the mask: expected \[1, 2 or 1, 768, D\]"),
        ((1, 3, TOKENS, 4), (1, 3, TOKENS, 4), "does not fit"),
        ((2, 2, TOKENS, 4), (2, 2, TOKENS, 4), "does not fit"),
        ((1, 2, TOKENS, 4), (1, 1, TOKENS, 4), "must have the shape of q"),
    ],
)
def test_tensors_that_don_t_fit_raise(q, k, message):
    with pytest.raises(ValueError, match=message):
        sparse_errors(torch.zeros(q), torch.zeros(k), torch.zeros(k), LOCAL)
