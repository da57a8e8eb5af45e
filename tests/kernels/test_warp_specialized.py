"""The warp-specialised kernel without a GPU: its tables, and its own source run by an emulator of Gluon."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dbsp_kernels.triton
from dbsp_kernels import KernelInputs
from dbsp_kernels.triton.hopper import launch_arguments
from dbsp_kernels.triton.paired_rows import pair_rows
from tests.kernels import gluon_emulator
from tests.kernels.packed_inputs import Packed, full_counts, kinder, packed, relative_error
from tests.support.generators import SEEDS, examples

SOURCE = Path(dbsp_kernels.triton.__file__).with_name("warp_specialized.py")


@given(rows=st.integers(1, 7), blocks=st.integers(1, 9), hint=st.booleans(), seed=SEEDS)
@examples(60)
def test_paired_lists_hold_each_rows_blocks_once_in_their_order(rows, blocks, hint, seed):
    p = kinder(packed(rows=rows, blocks=blocks, seed=seed))
    full = full_counts(p) if hint else torch.zeros_like(p.kv_count)
    schedule = torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).int()
    pairs = pair_rows(p.kv_index, p.kv_count, full, schedule)
    assert pairs.rows.flatten()[:rows].equal(schedule)
    for pair, two in enumerate(pairs.rows.tolist()):
        entries = pairs.list[pair, : pairs.tiles[pair]].tolist()
        wanted = [p.kv_index[row, : p.kv_count[row]].tolist() for row in two]
        assert sorted(entries) == sorted(set(wanted[0]) | set(wanted[1])), "each tile once"
        for side, row in enumerate(two):
            turns = pairs.turn[pair, side, : p.kv_count[row]].tolist()
            assert turns == sorted(turns)
            own = [entries[turn] for turn in turns]
            assert sorted(own) == sorted(wanted[side])
            assert sorted(own[: full[row]]) == sorted(wanted[side][: full[row]]), "full blocks first"


def emulated(p: Packed, hint: bool, seed: int = 0, source: Path = SOURCE) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = torch.full_like(p.q, torch.nan), torch.full(p.q.shape[:2], torch.nan)
    inputs = KernelInputs(*vars(p).values(), p.q.shape[-1] ** -0.5, full_counts(p) if hint else None)
    programs, arguments, constants = launch_arguments(inputs, out, lse)
    tiles = (64, p.k.shape[1], p.k.shape[1])
    arguments[:3] = [gluon_emulator.described(t, n) for t, n in zip(arguments[:3], tiles, strict=True)]
    gluon_emulator.run(source, "warp_specialized_kernel", programs, arguments, constants, seed)
    return out, lse


@pytest.mark.parametrize(("block_q", "block_k"), [*itertools.product((64, 128), repeat=2)])
@pytest.mark.parametrize("hint", [True, False])
def test_it_is_right_for_every_mix_of_blocks(block_q, block_k, hint):
    p = kinder(packed(rows=5, blocks=17, block_q=block_q, block_k=block_k, width=64, seed=3))
    assert 0 in p.kv_count
    assert p.kv_count.max() > 6, "more blocks than a ring has slots"
    for seed in range(3):
        out, lse = emulated(p, hint, seed)
        expected, expected_lse = p.exact()
        assert relative_error(out, expected) < 1e-6
        torch.testing.assert_close(lse, expected_lse.float(), rtol=1e-5, atol=1e-5)


def test_rows_that_share_nothing_do_not_lock_each_other():
    """One row's blocks all come before the other's: its group waits while many tiles pass that it skips."""
    p = packed(rows=2, blocks=20, block_q=64, block_k=64, width=16)
    index = torch.stack([torch.arange(20), torch.arange(20).roll(10)]).int()
    p = Packed(p.q, p.k, p.v, index, torch.tensor([10, 10]).int(), p.kv_len)
    assert relative_error(emulated(p, False)[0], p.exact()[0]) < 1e-6


FAULTS = {
    "a slot of values given back before they are read": (
        "        acc = warpgroup_mma_wait(0, deps=[acc])\n        mbarrier.arrive(v_empty.index(slot), count=1)\n",
        "        mbarrier.arrive(v_empty.index(slot), count=1)\n        acc = warpgroup_mma_wait(0, deps=[acc])\n",
    ),
    "tiles that one group passes, never given back": ("_pass(passed, turn,", "_pass(turn, turn,"),
    "the wrong phase": ("phase = (turn // STAGES) & 1", "phase = 0"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_finds(tmp_path, fault):
    before, after = FAULTS[fault]
    source = SOURCE.read_text()
    assert before in source
    broken = tmp_path / "broken.py"
    broken.write_text(source.replace(before, after))
    p = packed(rows=4, blocks=17, block_q=64, block_k=64, width=16, seed=3)
    wrong = 0
    for seed in range(5):
        try:
            wrong += not relative_error(emulated(p, False, seed, broken)[0], p.exact()[0]) < 1e-6
        except (gluon_emulator.Deadlock, AssertionError):
            wrong += 1
    assert wrong
