"""Several sequences in one attention: each as if it were alone, forward and backward, from loaders and back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
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
from tests.support.attention_cases import with_tables
from tests.support.dense_rows import dense_rows_on_the_cpu
from tests.support.generators import RandomSource
from tests.support.long import some_long
from tests.support.oracle import dense_attention, largest_difference, token_mask
from tests.support.repository import ROOT
from tests.support.shared import shared

HEADS, WIDTH = 4, 16
REQUEST = MaskRequest(0, HEADS, (1, 1, 1))
KINDS = ("dense", "window", "radial", "sparge", "random")


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
    """

    strategy: str
    seed: int = 0
    layout: str = "striped"
    one_long: bool = False
    dtype: torch.dtype = torch.float32
    dense_parts: bool = False
    sabotage: str | None = None

    @property
    def tolerance(self) -> float:
        return 1e-5 if self.dtype == torch.float32 else 1e-12

    @property
    def of_reference(self) -> dict[str, Any]:
        """Returns what one process's attention depends on, in addition to the seed."""
        return {"one_long": self.one_long, "dtype": self.dtype, "sabotage": self.sabotage}

    @property
    def sequences(self) -> list[tuple[BlockGrid, MaskSource]]:
        draws = np.random.default_rng(self.seed)
        blocks = [(16, 16), (32, 16), (16, 32)][self.seed % 3]
        found = []
        for index in range(draws.integers(2, 7)):
            thw = (4, 5, 8) if index == 0 else tuple(draws.integers(1, (4, 6, 7)).tolist())  # slots for a ring of six
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
    """Returns what one process gives, wrong if the case is sabotaged."""
    if case.sabotage == "a token attends into another sequence":
        heads = [torch.block_diag(*(token_mask(part)[h].float() for part in mask.parts)).bool() for h in range(HEADS)]
        allowed = torch.stack(heads)
        allowed[:, mask.parts[0].grid.tokens, 0] = True
        q, k, v = tensors
        scores = (q.double() @ k.double().transpose(-1, -2) * WIDTH**-0.5).masked_fill(~allowed, -torch.inf)
        return scores.softmax(-1).nan_to_num(0.0) @ v.double()
    return attention_of_each(mask, tensors)


def attention_of_each(mask: BlockMask, tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Returns dense attention of each sequence with its own mask."""
    own = zip(*(tensor.split([part.grid.tokens for part in mask.parts], dim=2) for tensor in tensors), strict=True)
    found = [
        dense_attention(*qkv, part, queries=torch.arange(part.grid.tokens))
        for qkv, part in zip(own, mask.parts, strict=True)
    ]
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


def run_packed(rank: int, world: int, case: PackedCase) -> float:
    """Returns the largest error on this rank's tokens, of the output and of the gradients."""
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
    executor = DualBalancedAttention.prepare(plan, mask, balanced, group, debug=True)
    if case.dense_parts:
        dense = dense_spans_of(mask, torch.device("cuda"))
        executor = with_tables(executor, build_tables(executor.prepared.table_layout, mask, dense))
        has_some = torch.tensor([any(executor.prepared.tables.dense)])
        assert any(group.all_gather(has_some)), "some rank must have dense rows"
    out = redistribution.back(executor(q, k, v), dim=2)
    out.backward(local[3])
    # 3. Against one process.
    assert torch.equal(slots, torch.arange(len(mine)))
    errors = [largest_difference(a.grad, b[:, :, mine]) for a, b in zip(local, gradients, strict=False)]
    return max(largest_difference(out, expected[:, :, mine]), *errors)


def run_page(rank: int, world: int, code: str) -> tuple[float, bool]:
    """Runs the example of docs/packed-sequences.md. Returns its error, and whether it has gradients."""
    names: dict = {}
    exec(code, names)
    gathered, whole = names["here"].detach(), torch.empty(names["striped"].tokens, names["here"].shape[1])
    for other, held in enumerate(SequenceGroup.from_group().all_gather(gathered)):
        mine, slots = (torch.from_numpy(a) for a in names["striped"].tokens_at(other))
        whole[mine] = held[slots]
    q, k, v = whole.view(1, len(whole), 3, names["heads"], names["width"]).permute(2, 0, 3, 1, 4)
    mine = torch.from_numpy(names["loaded"].tokens_at(rank)[0])
    error = largest_difference(names["out"], attention_of_each(names["mask"], (q, k, v))[:, :, mine])
    return error, bool(names["hidden"].grad.isfinite().all())


WORLDS = (2, 3, 4, 6)
LONG = ("U1R4", "U3R2", "U1R6", "U6R1")


@pytest.mark.parametrize(
    ("world", "strategy"), some_long([(w, s) for w in WORLDS for s in Strategy.all_for(w)], LONG), ids=str
)
def test_packed_sequences_equal_their_own_attention(threads, world, strategy):
    """Covers dense, window, radial, predicted and random masks; text or none; ranks without sequences."""
    for case in cases_for(strategy):
        with dense_rows_on_the_cpu():
            assert max(threads(world).run(run_packed, case)) <= case.tolerance, case


def test_token_that_attends_into_another_sequence_is_found(threads):
    case = PackedCase("U2R1", 4, sabotage="a token attends into another sequence")
    assert max(threads(2).run(run_packed, case)) > 1e-3


def test_example_of_the_page_runs_as_printed(pool):
    page = (ROOT / "docs" / "packed-sequences.md").read_text()
    code = "import torch\n" + page.partition("```python\nimport torch\n")[2].partition("```")[0]
    for error, has_gradients in pool(4).run(run_page, code):
        assert (error <= 1e-5, has_gradients) == (True, True)
