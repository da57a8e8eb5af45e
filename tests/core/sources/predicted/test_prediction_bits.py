"""The predictor's bits are those of its first, plainest form: all tokens at once, head by head, by stable sorting."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from dbsp_core.comm import block_pooling
from dbsp_core.config import DbspConfig
from dbsp_core.masks.block_mask import BlockMask
from dbsp_core.masks.grid import BlockAxis
from dbsp_core.sources import LocalQK, sol, sparge, vsa
from dbsp_kernels.prediction import sum_tokens
from dbsp_kernels.rounding import DIRECTION_UNIT, LIMIT, MEAN_UNIT
from tests.core.sources.predicted.sparge_cases import SpargeCase
from tests.support.interpreter import interpreted

CASES = (
    SpargeCase(settings={"cdf": 0.6, "similarity": 0.35}),
    SpargeCase(settings={"cdf": 0.95, "similarity": -1.0, "block_q": 8, "block_k": 8}, text_tokens=21, batch=2),
    SpargeCase(settings={"topk": 0.3, "similarity": 0.2}, dtype=torch.bfloat16, width=24),
    SpargeCase(settings={"cdf": 1.0, "similarity": 0.4, "attention_sink": True}, dtype=torch.float16),
)


GPU_FUNCTIONS = ("sum_tokens", "pool_rows", "pooled_scores", "select_blocks")


def halving_sum(terms: torch.Tensor) -> torch.Tensor:
    width = 1 << (terms.shape[-1] - 1).bit_length()
    terms = torch.nn.functional.pad(terms, (0, width - terms.shape[-1]))
    while width > 1:
        width //= 2
        terms = terms[..., :width] + terms[..., width:]
    return terms[..., 0]


def plain_sums(tokens: torch.Tensor, block: torch.Tensor, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int64[B, H, blocks, D] each, of values and of directions. tokens: [B, H, m, D], block: int64[m]"""
    part = torch.nan_to_num(tokens.float(), nan=0.0).clamp_(-LIMIT, LIMIT)
    length = halving_sum(part * part).double().sqrt_().float().unsqueeze(-1)
    direction = torch.where(length > 0, part / length, torch.zeros_like(part))
    units = (part.double() / MEAN_UNIT).floor_().long(), (direction / DIRECTION_UNIT).floor_().long()
    zeros = part.new_zeros(*part.shape[:2], blocks, part.shape[3], dtype=torch.int64)
    return zeros.index_add(2, block, units[0]), zeros.index_add(2, block, units[1])


def plain_pool(tokens: torch.Tensor, axis: BlockAxis) -> tuple[torch.Tensor, torch.Tensor]:
    """mean float32[B, H, n, D] and similarity float32[B, H, n]. tokens: in the order of the blocks"""
    values, directions = plain_sums(tokens, torch.from_numpy(axis.block_of), len(axis))
    lengths = torch.from_numpy(axis.lengths)[:, None]
    direction = directions.double() * DIRECTION_UNIT / lengths
    return (values.double() * MEAN_UNIT / lengths).float(), halving_sum(direction * direction).float()


def plain_bits(case: SpargeCase) -> torch.Tensor:
    """bool[B·H, nq, nk]"""
    source, grid = case.source, case.source.grid(case.request)
    order = torch.from_numpy(grid.token_permutation(source.token_order))
    q, k = (tensor[:, :, order] for tensor in case.tensors())
    (mean_q, alike_q), (mean_k, alike_k) = plain_pool(q, grid.q_axis), plain_pool(k, grid.k_axis)
    heads = zip(*(t.flatten(0, 1) for t in (mean_q, alike_q, mean_k, alike_k)), strict=True)
    bits = torch.stack([plain_head(*head, case.width**-0.5, case) for head in heads])
    bits[:, :, 0] |= source.attention_sink
    grid.make_text_dense(bits)
    return bits


def plain_head(
    q: torch.Tensor, alike_q: torch.Tensor, k: torch.Tensor, alike_k: torch.Tensor, scale: float, case: SpargeCase
) -> torch.Tensor:
    """bool[nq, nk]"""
    source = case.source
    vague_q, vague_k = alike_q <= source.similarity, alike_k <= source.similarity
    scores = (q.double() @ k.double().T * scale).masked_fill_(vague_k, -torch.inf)
    chance = torch.softmax(scores, dim=-1).nan_to_num_(0.0)
    ordered, block = torch.sort(chance, dim=-1, descending=True, stable=True)
    place = torch.arange(len(k))
    if source.topk is not None:
        taken = (place < max(1, math.floor(source.topk * len(k) + 1e-9))).expand_as(chance)
    elif source.cdf == 1:
        taken = torch.ones_like(chance, dtype=torch.bool)
    else:
        taken = (ordered.cumsum(-1) <= source.cdf) | (place == 0)
    return torch.zeros_like(taken).scatter_(-1, block, taken) | vague_q[:, None] | vague_k


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("case", CASES)
def test_bits_are_those_of_the_plain_form(case, seed):
    case = replace(case, seed=seed)
    mask = case.source.mask(case.request, LocalQK.alone(*case.tensors()))
    assert mask.fingerprint == BlockMask(plain_bits(case), mask.grid).fingerprint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_those_of_the_plain_form(dtype, monkeypatch):
    monkeypatch.setattr("dbsp_kernels.prediction.TOKENS_AT_A_TIME", 100)  # blocks longer than that, too
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(2, 3, 400, 24, generator=generator) * torch.logspace(-30, 5, 400)[:, None]
    tokens[0, 1, 5], tokens[1, 2, 7, 0], tokens[0, 0, 3, 1] = 0.0, torch.nan, -torch.inf
    tokens = tokens.to(dtype)
    place, first = torch.randperm(400, generator=generator)[:380], torch.tensor([0, 40, 80, 120, 120, 290, 370, 380])
    block = torch.repeat_interleave(torch.arange(7), first.diff())
    expected = plain_sums(tokens[:, :, place], block, 7)
    sums = sum_tokens(tokens, place, first).transpose(0, 1)
    assert torch.equal(sums[..., :-2], torch.cat(expected, dim=-1))
    assert not sums[..., -2:].any()


@pytest.mark.parametrize(
    "settings",
    [
        {"source": "sparge", "topk": 0.3, "similarity": 0.2, "attention_sink": True},
        {"source": "sol", "tau": 0.5, "thresh_type": "exact"},
        {"source": "vsa", "sparsity": 0.7, "tile": [2, 2, 4]},
        {"source": "nabla", "cdf": 0.6, "window": [1, 3, 3]},
    ],
    ids=lambda settings: settings["source"],
)
def test_kernels_for_gpus_predict_the_same_bits(settings, monkeypatch):
    """In Triton's interpreter, where there is no GPU."""
    pytest.importorskip("triton")
    from dbsp_kernels.triton import prediction

    case = SpargeCase(thw=(3, 9, 10), text_tokens=5, heads=3, batch=2)
    source = DbspConfig.load({"mask": settings | {"block_q": 16, "block_k": 16}}).mask
    expected = source.mask(case.request, LocalQK.alone(*case.tensors()))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for module, name in itertools.product((block_pooling, sol, sparge, vsa), GPU_FUNCTIONS):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, getattr(prediction, f"{name}_triton"))
    with interpreted():
        found = source.mask(case.request, LocalQK.alone(*(one.to(device) for one in case.tensors())))
    assert found.fingerprint == expected.fingerprint
    assert expected.density < 0.9
