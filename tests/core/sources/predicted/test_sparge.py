"""SpargeAttn's predictor against the paper written out, and its sums."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dbsp_core.config import DbspConfig
from dbsp_core.sources import LocalQK, SpargeSource
from dbsp_kernels.prediction import pool_rows, sum_tokens
from tests.core.sources.predicted.sparge_cases import SpargeCase, alone, predict
from tests.support.generators import SEEDS, examples
from tests.support.interpreter import interpreted

CASES = {
    "cdf": SpargeCase(),
    "topk": SpargeCase(settings={"topk": 0.3, "similarity": -1.0}),
    "text, batch of two": SpargeCase(text_tokens=21, batch=2, thw=(4, 5, 11)),
    "sink, small blocks": SpargeCase(
        settings={"cdf": 0.5, "similarity": 0.1, "attention_sink": True, "block_q": 8, "block_k": 24}
    ),
    "rows of text": SpargeCase(text_tokens=70, settings={"cdf": 0.5, "similarity": 0.2, "dense_text": "rows"}),
    "columns of text": SpargeCase(text_tokens=70, settings={"topk": 0.3, "dense_text": "columns"}),
    "no text": SpargeCase(text_tokens=70, settings={"topk": 0.3, "similarity": -1.0, "dense_text": False}),
    "bfloat16": SpargeCase(dtype=torch.bfloat16),
    "tiles": SpargeCase(settings={"cdf": 0.7, "similarity": 0.3, "token_order": "tile:2x4x4"}, thw=(4, 8, 9), heads=2),
    "everything": SpargeCase(settings={"cdf": 1.0, "similarity": -1.0}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_mask_equals_that_of_the_paper(case):
    mask = alone(case)
    known = ("cdf", "topk", "similarity", "attention_sink", "dense_text")
    settings = {key: value for key, value in case.settings.items() if key in known}
    expected, margins = predict(*case.by_head(), mask.grid, **settings)
    different = mask.bits.numpy() != expected
    # Directions are counted in units of 2^-20: nothing may differ that was not that near to going the other way.
    near = (margins.chosen < 1e-9) | (margins.similar_q < 1e-5)[:, :, None] | (margins.similar_k < 1e-5)[:, None]
    assert not (different & ~near).any()
    assert different.mean() < 0.001
    assert 0.15 < mask.density < 0.9 or settings.get("cdf") == 1


@pytest.mark.parametrize(
    ("share", "blocks", "count"),
    [
        ({"sparsity": 0.9}, 590, 58),
        ({"topk": 0.1}, 590, 59),
        ({"sparsity": 0.85}, 598, 89),
        ({"sparsity": 0.8}, 512, 102),
        ({"topk": 0.29}, 100, 29),
        ({"sparsity": 0.99}, 20, 1),
    ],
)
def test_shares_keep_the_blocks_that_lightx2v_keeps(share, blocks, count):
    """Counts of LightX2V, in its floating point; `topk` means the decimal number."""
    assert SpargeSource(**share).limits(blocks, step=0) == (None, count)


def test_settings_by_step_are_those_of_the_step_and_the_last_ones_after_it():
    tokens = LocalQK.alone(*SpargeCase().tensors())
    for by_step, alike in (({"topk": [1, 0.5, 0.2]}, "topk"), ({"tau": (2.0, 0.5, 0.0)}, "tau")):
        source = DbspConfig.load({"mask": {"source": "sol" if alike == "tau" else "sparge", **by_step}}).mask
        assert source.by_step
        assert not replace(source, **{alike: 0.5}).by_step
        for step, value in enumerate([*by_step[alike], by_step[alike][-1]]):
            request = replace(SpargeCase().request, step=step)
            expected = replace(source, **{alike: float(value)}).mask(request, tokens).bits
            assert torch.equal(source.mask(request, tokens).bits, expected)


def same_sums(width: int, dtype: torch.dtype) -> bool:
    """Returns whether the Triton kernel's sums are bitwise torch's: strides, gaps, empty and long blocks, NaN."""
    from dbsp_kernels.triton.prediction import pool_rows_triton, sum_tokens_triton

    generator = torch.Generator().manual_seed(width)
    tokens = torch.randn(2, 90, 3, width, generator=generator) * torch.logspace(-6, 3, 90)[:, None, None]
    tokens[0, 5, 1], tokens[1, 7, 2, 0] = 0.0, torch.nan
    tokens = tokens.to(dtype).transpose(1, 2)  # the layout of diffusers: [B, n, H, D]
    order = torch.randperm(90, generator=generator)[:80]
    first = torch.tensor([0, 40, 40, 73, 80])
    sums, lengths = sum_tokens_triton(tokens, order, first), torch.tensor([40, 1, 33, 7])
    rows = pool_rows_triton(sums[:, :, 1:], lengths[1:]), pool_rows(sums[:, :, 1:], lengths[1:])
    return torch.equal(sums, sum_tokens(tokens, order, first)) and torch.equal(*rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 3, 16, 24])
def test_triton_kernels_sum_and_pool_as_torch(width, dtype):
    pytest.importorskip("triton")
    with interpreted():
        assert same_sums(width, dtype)


@examples(60)
@given(st.integers(1, 40), st.integers(1, 33), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), SEEDS)
def test_sums_of_distributed_tokens_are_identical(count, width, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(2, 3, count, width, generator=generator) * torch.logspace(-6, 3, count)[:, None]
    tokens = tokens.to(dtype)
    block = torch.randint(0, 3, (count,), generator=generator)
    owner = torch.randint(0, 4, (count,), generator=generator)

    def sums(mine: torch.Tensor) -> torch.Tensor:
        order = torch.argsort(block[mine], stable=True)
        return sum_tokens(tokens[:, :, mine], order, torch.searchsorted(block[mine][order], torch.arange(4)))

    apart = [sums(owner == rank) for rank in range(4)]
    with mock.patch("dbsp_kernels.prediction.TOKENS_AT_A_TIME", 7):  # blocks longer than that, too
        assert torch.equal(sum(apart), sums(owner >= 0))


def test_values_that_are_not_finite_give_equal_masks():
    """Checks that ranks agree on a mask even for a useless video."""
    q, k = CASES["cdf"].tensors()
    q[0, 0, 0, 0], k[0, 1, 5] = torch.nan, torch.inf
    first, second = (CASES["cdf"].source.mask(CASES["cdf"].request, LocalQK.alone(q, k)) for _ in range(2))
    assert first.fingerprint == second.fingerprint
