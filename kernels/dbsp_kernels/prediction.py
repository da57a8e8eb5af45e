"""Mean pooling of blocks, scores of means, and block selection, bitwise identical on all devices."""

from __future__ import annotations

import itertools

import torch

from dbsp_kernels.rounding import DIRECTION_UNIT, LEAST_EXPONENT, LIMIT, MEAN_UNIT, SCALE_EXPONENT, UNIT_EXPONENT
from dbsp_kernels.tables import pack_bits

TOKENS_AT_A_TIME = 1024  # on the CPU, so that intermediates stay in the cache


def sum_tokens(
    tokens: torch.Tensor,
    position: torch.Tensor,
    first: torch.Tensor,
    sums: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sums the tokens of each block in integers, so that the order of summation does not matter.

    NaN counts as 0 and values beyond ±LIMIT as ±LIMIT.

    Args:
        tokens: [B, H, n, D], float32, bfloat16 or float16, any strides.
        position: int64[m], indices of the summed tokens, block after block.
        first: int64[blocks + 1], start of each block in `position`, and the end of the last.
        sums, rows: int64[H, B, n, 2 · D + 2], contiguous, to write into and return, and int64[blocks], each block's
            row in it. None: a new tensor of these blocks.

    Returns:
        int64[H, B, blocks, 2 · D + 2]: sum of values in units of MEAN_UNIT, sum of directions (values divided by the
        token's norm) in units of DIRECTION_UNIT, each rounded down per token, and two zeros as padding, so that a
        block's sums take the room of four rows of `pool_rows`.
    """
    if tokens.is_cuda:
        from dbsp_kernels.triton.prediction import sum_tokens_triton  # here: triton need not be installed

        return sum_tokens_triton(tokens, position, first, sums, rows)
    if sums is not None:
        sums[:, :, rows] = sum_tokens(tokens, position, first)
        return sums
    (batch, heads, _, head_dim), blocks = tokens.shape, len(first) - 1
    sums = tokens.new_zeros(heads, batch, blocks, 2 * head_dim + 2, dtype=torch.int64)
    block = torch.repeat_interleave(torch.arange(blocks, device=first.device), first.diff())
    together = list(zip(position.split(TOKENS_AT_A_TIME), block.split(TOKENS_AT_A_TIME), strict=True))
    # Units are powers of 2, so scaling by them is exact in float32.
    for item, head, (positions, into) in itertools.product(range(batch), range(heads), together):
        part = tokens[item, head].index_select(0, positions).to(torch.float32)
        part = torch.nan_to_num_(part, nan=0.0).clamp_(-LIMIT, LIMIT)
        values, directions = sums[head, item, :, :-2].chunk(2, dim=-1)
        values.index_add_(0, into, part.mul(1 / MEAN_UNIT).floor_().long())
        # float64: torch's float32 sqrt on CPU is not always correctly rounded; a float64 sqrt rounded to float32 is.
        norm = halving_sum(part * part).to(torch.float64).sqrt_().to(torch.float32)
        part.div_(norm.masked_fill_(norm == 0, torch.inf)[:, None])  # zero tokens: direction 0
        # floor, because adding a half would round twice, and differently on other devices
        directions.index_add_(0, into, part.mul_(1 / DIRECTION_UNIT).floor_().long())
    return sums


def pool_rows(sums: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Returns means and similarities of complete blocks.

    `sums` are those of `sum_tokens`, lengths int64[blocks]. Returns float32[H, B, blocks, D + 1]: the mean, then the
    mean cosine over all pairs of the block's n tokens, including self-pairs, which is |Σ directions|² / n².
    """
    if sums.is_cuda:
        from dbsp_kernels.triton.prediction import pool_rows_triton  # here: triton need not be installed

        return pool_rows_triton(sums, lengths)
    values, directions = sums[..., :-2].to(torch.float64).chunk(2, dim=-1)
    mean = values * MEAN_UNIT / lengths[:, None]
    direction = directions * DIRECTION_UNIT / lengths[:, None]
    return torch.cat([mean, halving_sum(direction * direction)[..., None]], dim=-1).to(torch.float32)


def halving_sum(terms: torch.Tensor) -> torch.Tensor:
    """Sums [..., D] over the last dimension in a fixed order, by adding halves until one element is left."""
    width = 1 << (terms.shape[-1] - 1).bit_length()
    if width > terms.shape[-1]:
        terms = torch.nn.functional.pad(terms, (0, width - terms.shape[-1]))
    while width > 1:
        width //= 2
        terms = terms[..., :width] + terms[..., width:]
    return terms[..., 0]


def pooled_scores(rows: torch.Tensor, nq: int, scale: float, similarity: float) -> torch.Tensor:
    """Returns scores of mean queries and keys, −inf at key blocks whose similarity is at most `similarity`.

    `rows` float32[heads, nq + nk, D + 1] are from `pool_rows`: queries, then keys; finite, D ≤ 2048. Each row's D
    elements are rounded to 22-bit integers times a power of two. Their products and sums are exact in float64 and in
    integers, so the scores float64[heads, nq, nk] are bitwise identical on all devices.
    """
    if rows.is_cuda:
        from dbsp_kernels.triton.prediction import pooled_scores_triton  # here: triton need not be installed

        return pooled_scores_triton(rows, nq, scale, similarity)
    means = rows[..., :-1]
    # |x| < 2^(exponent − 126), and scaling by powers of two is exact.
    exponent = (means.abs().amax(dim=-1).view(torch.int32) >> 23).clamp_(min=LEAST_EXPONENT)
    scaled = means * (SCALE_EXPONENT - exponent << 23).view(torch.float32)[..., None]
    whole, unit = scaled.round_().double(), (exponent.long() + UNIT_EXPONENT << 52).view(torch.float64)
    scores = torch.bmm(whole[:, :nq], whole[:, nq:].mT)
    scores.mul_(unit[:, :nq, None] * scale).mul_(unit[:, None, nq:])
    return scores.masked_fill_(rows[:, None, nq:, -1] <= similarity, -torch.inf)


def select_blocks(
    chance: torch.Tensor, dense: torch.Tensor, cdf: float | None, count: int, crossing: bool = False
) -> torch.Tensor:
    """Selects each row's blocks of largest chance (ties: lower column) plus dense rows and columns, as `pack_bits`.

    Chances are accumulated exactly in units of 2^-60 on GPUs, sequentially in float64 on the CPU.

    Args:
        chance: float64[heads, nq, nk], at least 0 and below 2; NaN counts as 0.
        dense: bool[heads, nq + nk], rows and then columns that are always dense.
        cdf: Largest cumulative chance of the selected blocks, of which there is at least one; None: select `count`.
        crossing: True to include the block at which the cumulative chance exceeds `cdf`.
    """
    if chance.is_cuda:
        from dbsp_kernels.triton.prediction import select_blocks_triton  # here: triton need not be installed

        return select_blocks_triton(chance, dense, cdf, count, crossing)
    nq, nk = chance.shape[1:]
    ordered, block = torch.sort(chance.nan_to_num(0.0), dim=-1, descending=True, stable=True)
    position = torch.arange(nk, device=chance.device)
    if cdf is None:
        taken = (position < count).expand_as(chance)
    else:
        taken = ordered.cumsum(-1) <= cdf
        if crossing:
            taken = taken.roll(1, dims=-1)
        taken[..., 0] = True
    chosen = torch.zeros_like(chance, dtype=torch.bool).scatter_(-1, block, taken)
    return pack_bits(chosen | dense[:, :nq, None] | dense[:, None, nq:])
