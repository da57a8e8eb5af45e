"""Workers of test_packed_attention and test_redistribution: sequences from loaders, balanced, and back."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from dbsp_core import (
    BlockGrid,
    BlockMask,
    DualBalancedAttention,
    Redistribution,
    SequenceGroup,
    SequenceLayout,
    Strategy,
    make_plan,
)
from dbsp_core.runtime.tables import build_tables, dense_spans_of
from dbsp_core.sources import (
    DenseSource,
    LocalQK,
    MaskRequest,
    MaskSource,
    RadialSource,
    SpargeSource,
    WindowSource,
    packed_mask,
)
from dbsp_core.sources.base import BlockSizes
from tests.support.attention_cases import with_tables
from tests.support.interpreter import interpreted
from tests.support.oracle import dense_attention, largest_difference, token_mask
from tests.support.shared import shared

HEADS, WIDTH = 4, 16
REQUEST = MaskRequest(0, HEADS, (1, 1, 1))
KINDS = ("dense", "window", "radial", "sparge", "random")


@dataclass(frozen=True)
class RandomSource(BlockSizes):
    """Asymmetric, unequal over heads and rows, some of them empty; every head in a token order of its own."""

    seed: int = 0

    def mask(self, request: MaskRequest) -> BlockMask:
        draws = np.random.default_rng(self.seed)
        orders = tuple(draws.choice(["thw", "hwt", "wth"], request.heads).tolist())
        grid = replace(self.grid(request), orders=orders)
        level = draws.uniform(0.1, 0.9, (request.heads, grid.nq, 1))
        bits = draws.random((request.heads, grid.nq, grid.nk)) < level
        bits[draws.random((request.heads, grid.nq)) < 0.15] = False
        return BlockMask(bits, grid)


def source_of(kind: str, blocks: tuple[int, int], seed: int) -> MaskSource:
    if kind == "sparge":
        return SpargeSource(*blocks, cdf=0.7)
    if kind == "window":
        return WindowSource(*blocks, window=(3, 3, 5))
    if kind == "radial":
        return RadialSource(*blocks, width=0.4)
    return DenseSource(*blocks) if kind == "dense" else RandomSource(*blocks, seed=seed)


@dataclass(frozen=True)
class PackedCase:
    """Two to six sequences; everything random comes from `seed`.

    one_long: whether one sequence is longer than all others together
    layout:   of attention: a name, or "loaders": where the loaders left the sequences
    dense_parts: whether dense sequences of heads go to the dense kernel, as where there is a GPU
    sabotage: a negative control
    first:    the first sequence's video, which by default has slots for a ring of six
    """

    strategy: str
    seed: int = 0
    layout: str = "striped"
    one_long: bool = False
    dtype: torch.dtype = torch.float32
    kernel: str = "auto"
    dense_parts: bool = False
    sabotage: str | None = None
    first: tuple[int, int, int] = (4, 5, 8)

    @property
    def tolerance(self) -> float:
        return 1e-5 if self.dtype == torch.float32 else 1e-12

    @property
    def of_reference(self) -> dict[str, Any]:
        """Returns what one process's attention depends on, in addition to the seed."""
        return {"one_long": self.one_long, "dtype": self.dtype, "sabotage": self.sabotage, "first": self.first}

    @property
    def sequences(self) -> list[tuple[BlockGrid, MaskSource]]:
        draws = np.random.default_rng(self.seed)
        blocks = [(16, 16), (32, 16), (16, 32)][self.seed % 3]
        found = []
        for index in range(draws.integers(2, 7)):
            thw = self.first if index == 0 else tuple(draws.integers(1, (4, 6, 7)).tolist())
            thw = (8, 9, 10) if self.one_long and index == 1 else thw
            text = int(draws.integers(1, 25)) if draws.random() < 0.5 else 0
            source = source_of(KINDS[(self.seed + index) % len(KINDS)], blocks, self.seed + index)
            found.append((BlockGrid(text + int(np.prod(thw)), text, *blocks, thw), source))
        return found

    def loaders(self, world: int) -> SequenceLayout:
        """Returns whole sequences on some of the ranks: most often one has none."""
        draws = np.random.default_rng(self.seed + 1)
        lengths = [grid.tokens for grid, _ in self.sequences]
        having = draws.permutation(world)[: max(1, world - 1)]
        return SequenceLayout.whole_sequences(lengths, draws.choice(having, len(lengths)).tolist(), world)

    def balanced(self, grid: BlockGrid, world: int) -> SequenceLayout:
        if self.layout == "loaders":
            return self.loaders(world)
        return SequenceLayout.named(self.layout, grid, Strategy.parse(self.strategy))


def cases_for(strategy: Strategy) -> list[PackedCase]:
    """Returns cases with every layout, one long sequence, both dtypes and dense heads apart."""
    layouts, cases = ("striped", "contiguous", "loaders"), []
    for number in range(4):
        dtype = torch.float64 if number % 2 else torch.float32
        seed = 4 * (strategy.world % 2) + number  # two sets of references for all strategies
        case = PackedCase(str(strategy), seed, layouts[(number + strategy.ring) % 3], number == 3, dtype)
        cases.append(replace(case, dense_parts=number == 0))
    return cases


def expected_of(case: PackedCase, mask: BlockMask, tensors: list[torch.Tensor]) -> torch.Tensor:
    """Returns dense attention of each sequence with its own mask."""
    if case.sabotage == "a token attends into another sequence":
        heads = [torch.block_diag(*(token_mask(part)[h].float() for part in mask.parts)).bool() for h in range(HEADS)]
        allowed = torch.stack(heads)
        allowed[:, mask.parts[0].grid.tokens, 0] = True
        q, k, v = tensors
        scores = (q.double() @ k.double().transpose(-1, -2) * WIDTH**-0.5).masked_fill(~allowed, -torch.inf)
        return scores.softmax(-1).nan_to_num(0.0) @ v.double()
    found, first = [], 0
    for part in mask.parts:
        own = [t[:, :, first : first + part.grid.tokens] for t in tensors]
        found.append(dense_attention(*own, part, queries=torch.arange(part.grid.tokens)))
        first += part.grid.tokens
    return torch.cat(found, dim=2)


@shared
def _alone(case: PackedCase) -> tuple[list[torch.Tensor], int, torch.Tensor, list[torch.Tensor]]:
    """Returns q, k, v and dout of all tokens, and one process's mask fingerprint, output and gradients."""
    generator = torch.Generator().manual_seed(case.seed)
    tokens = sum(grid.tokens for grid, _ in case.sequences)
    full = [torch.randn(1, HEADS, tokens, WIDTH, generator=generator, dtype=case.dtype) for _ in range(4)]
    mask = packed_mask(case.sequences, REQUEST, LocalQK.alone(*full[:2]))
    leaves = [t.double().clone().requires_grad_(True) for t in full[:3]]
    expected = expected_of(case, mask, leaves)
    gradients = torch.autograd.grad(expected, leaves, full[3].double())
    return full, mask.fingerprint, expected.detach(), list(gradients)


def run_packed(rank: int, world: int, cases: list[PackedCase]) -> list[tuple[float, float]]:
    """Returns by case the largest errors on this rank's tokens: of the output, and of the gradients."""
    return [_run_one(rank, world, case) for case in cases]


def _run_one(rank: int, world: int, case: PackedCase) -> tuple[float, float]:
    sequences, loaders = case.sequences, case.loaders(world)
    group = SequenceGroup.from_group()
    full, of_mask, expected, gradients = _alone(PackedCase("-", case.seed, **case.of_reference))
    mine, slots = (torch.from_numpy(a) for a in loaders.tokens_at(rank))
    # 1. What this rank's loader gives, without padding: nothing where it has no sequence.
    local = [t[:, :, mine].clone().requires_grad_(index < 3) for index, t in enumerate(full)]
    balanced = case.balanced(BlockGrid.packed([grid for grid, _ in sequences]), world)
    redistribution = Redistribution.between(loaders, balanced, group, source_slots=len(mine), debug=True)
    # 2. To the balanced layout, attention there, and back.
    q, k, v = redistribution.there(*local[:3], dim=2)
    with torch.no_grad():
        mask = packed_mask(sequences, REQUEST, LocalQK(q, k, balanced, group, WIDTH**-0.5))
    assert mask.fingerprint == of_mask
    plan = make_plan(mask, case.strategy, layout=balanced)
    executor = DualBalancedAttention.prepare(plan, mask, balanced, group, kernel=case.kernel, debug=True)
    if case.dense_parts:
        dense = dense_spans_of(mask, torch.device("cuda"))
        executor = with_tables(executor, build_tables(executor.prepared.table_layout, mask, dense))
        has_some = torch.tensor([any(table.dense is not None for table in executor.prepared.tables)])
        assert any(group.all_gather(has_some)), "some rank must have dense rows"
    with interpreted() if case.kernel == "triton" else contextlib.nullcontext():
        out = redistribution.back(executor(q, k, v), dim=2)
        out.backward(local[3])
    # 3. Against one process.
    assert torch.equal(slots, torch.arange(len(mine)))
    errors = [largest_difference(out, expected[:, :, mine])]
    errors += [largest_difference(a.grad, b[:, :, mine]) for a, b in zip(local, gradients, strict=False)]
    return errors[0], max(errors[1:])


class Counting(SequenceGroup):
    """All ranks; notes the bytes that are handed to all-to-alls, by destination."""

    bytes: list

    def __init__(self):
        everyone = SequenceGroup.from_group()
        super().__init__(everyone.rank, everyone.size, everyone._held_by_torch)
        object.__setattr__(self, "bytes", [])

    def all_to_all(self, sent, receive_splits, send_splits):
        self.bytes.append([n * sent[0:1].numel() * sent.element_size() if len(sent) else 0 for n in send_splits])
        return super().all_to_all(sent, receive_splits, send_splits)


def run_redistribution(rank: int, world: int, seed: int) -> dict:
    """Redistributes between two random layouts and back. Returns what came out."""
    draws = np.random.default_rng(seed)
    lengths = draws.integers(1, 60, draws.integers(1, 6)).tolist()
    loaders = SequenceLayout.whole_sequences(lengths, draws.integers(0, world, len(lengths)).tolist(), world)
    tokens = sum(lengths)
    target = SequenceLayout.from_streams([draws.permutation(tokens)], world)
    group = Counting()
    redistribution = Redistribution.between(loaders, target, group, debug=bool(seed % 2))
    generator = torch.Generator().manual_seed(seed)
    whole = [
        torch.randn(tokens, 3, 5, generator=generator),
        torch.randint(-(2**60), 2**60, (tokens,), generator=generator),
        torch.randn(tokens, 2, generator=generator).bfloat16(),
        torch.rand(tokens, generator=generator) < 0.5,
        torch.randn(tokens, 1, dtype=torch.complex128, generator=generator),
        torch.randint(0, 100, (2, tokens), generator=generator, dtype=torch.int16),
    ]
    dims = (0, 0, 0, 0, 0, 1)

    def held(layout: SequenceLayout) -> list[torch.Tensor]:
        here, slots = (torch.from_numpy(a) for a in layout.tokens_at(rank))
        found = []
        for tensor, dim in zip(whole, dims, strict=True):
            shape = list(tensor.shape)
            shape[dim] = layout.shard
            found.append(tensor.new_zeros(shape).index_copy(dim, slots, tensor.index_select(dim, here)))
        return found

    local = held(loaders)
    there = redistribution.there(*local, dim=dims)
    back = redistribution.back(*there, dim=dims)
    token_bytes = sum(t.select(dim, 0).numel() * t.element_size() for t, dim in zip(whole, dims, strict=True))
    moved = [
        int(((one.rank == rank) & (other.rank != rank)).sum())
        for one, other in itertools.permutations((loaders, target))
    ]
    # Gradients take the way back, and padding has none.
    leaf = local[0].clone().requires_grad_(True)
    weights = torch.randn(target.shard, 3, 5, generator=generator)
    arrived, labels = redistribution.there(leaf, local[1])
    (arrived * weights).sum().backward()
    return {
        "there": _identical_bits(there, held(target)),
        "round trip": _identical_bits(back, local),
        "bytes": group.bytes[:2],
        "said": redistribution.bytes_sent(token_bytes),
        "moved": [n * token_bytes for n in moved],
        "gradient": _identical_bits([leaf.grad], [redistribution.back(weights)]) and not labels.requires_grad,
        "exchanges": len(group.bytes),
    }


def _identical_bits(found, expected) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def redistribute_wrongly(rank: int, world: int, fault: str, culprit: int) -> None:
    """Redistributes with other tokens, dtype, layout or checks on one rank."""
    source = SequenceLayout.whole_sequences([7, 9], [0, 1], world)
    target = SequenceLayout.contiguous(16, world)
    slots, dtype = 9, torch.float32
    if rank == culprit and fault == "slots":
        slots = 8
    if rank == culprit and fault == "dtype":
        dtype = torch.float64
    if rank == culprit and fault == "layouts":
        source = SequenceLayout.whole_sequences([9, 7], [0, 1], world)
    debug = fault == "debug" and rank == culprit
    Redistribution.between(source, target, debug=debug).there(torch.zeros(slots, 2, dtype=dtype))


def run_page(rank: int, world: int, code: str) -> dict:
    """Runs the example of docs/packed-sequences.md. Returns its errors and balance."""
    names: dict = {}
    exec(code, names)
    expected, first = [], 0
    gathered = names["here"].detach()
    tokens = SequenceGroup.from_group().all_gather(gathered)
    whole = torch.empty(names["striped"].tokens, gathered.shape[1])
    for other, held in enumerate(tokens):
        mine, slots = (torch.from_numpy(a) for a in names["striped"].tokens_at(other))
        whole[mine] = held[slots]
    q, k, v = whole.view(1, len(whole), 3, names["heads"], names["width"]).permute(2, 0, 3, 1, 4)
    for part in names["mask"].parts:
        own = [t[:, :, first : first + part.grid.tokens] for t in (q, k, v)]
        expected.append(dense_attention(*own, part, queries=torch.arange(part.grid.tokens)))
        first += part.grid.tokens
    mine = torch.from_numpy(names["loaded"].tokens_at(rank)[0])
    error = largest_difference(names["out"], torch.cat(expected, dim=2)[:, :, mine])
    return {
        "error": error,
        "rho": names["plan"].rho,
        "before": names["plan"].rho_before,
        "gradient": names["hidden"].grad is not None and bool(names["hidden"].grad.isfinite().all()),
    }
