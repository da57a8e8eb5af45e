"""KnapFormer's Table 1, rebuilt: what the paper's own numbers confirm, what is counted, what is predicted."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dbsp_core.planning.bags import BagTopology
from examples.data_codes import DrawnSequences
from scripts.reproduce.knapformer import throughput
from scripts.reproduce.knapformer.shared import TABLE_1, WORLD, chunks, drawn
from scripts.reproduce.knapformer.throughput import FITTED, LOW, PIECE_S, load_of, rebuild

WIDTH, LAYERS = 3072, 57


@pytest.fixture(scope="module")
def rows():
    return rebuild(1, PIECE_S)[0]


@pytest.mark.parametrize("stream", TABLE_1)
def test_drawn_streams_have_the_tokens_and_the_flop_of_the_paper(stream):
    """Compares means of 20 draws: TPS · FBL is tokens, HFU · peak · FBL is FLOP, for any bags."""
    steps = [drawn(stream, seed).tokens.astype(float) for seed in range(20)]
    tokens = np.mean([step.sum() for step in steps])
    flop = np.mean([4 * LAYERS * (24 * step * WIDTH**2 + 4 * step**2 * WIDTH).sum() for step in steps])
    for paper in TABLE_1[stream].values():
        assert paper.tps * paper.fbl_s == pytest.approx(tokens, rel=0.005)
        assert paper.hfu * WORLD * 989e12 * paper.fbl_s == pytest.approx(flop, rel=0.005)


def test_rows_held_out_are_within_8_percent(rows):
    """Compares all three columns; rate and bandwidth alone are not within."""
    fitted = [row for row in rows if row.role == "fitted"]
    assert {(row.stream, row.bags) for row in fitted} == set(FITTED)
    assert [row.error for row in fitted] == pytest.approx([0, 0], abs=1e-9)
    held_out = [row for row in rows if row.role == "held out"]
    assert len(held_out) == 8
    for row in held_out:
        assert max(abs(row.error), abs(row.tps / row.paper_tps - 1), abs(row.hfu / row.paper_hfu - 1)) < 0.08
    assert max(abs(row.simple_error) for row in held_out) > 0.08


def test_what_a_step_asks_is_counted_by_hand(monkeypatch):
    """Gives each rank an equal sequence of 1,024 tokens: bags of two halve each of two sequences."""
    similar = DrawnSequences(np.zeros(WORLD, dtype=np.int64), np.array([[1, 32, 32]] * WORLD), np.arange(WORLD))
    monkeypatch.setattr(throughput, "drawn", lambda stream, seed: similar)
    linear, attention = 24 * 1024 * WIDTH**2, 4 * 1024**2 * WIDTH
    two = load_of(LOW, "g2n16", "knapsack", 1)
    assert two.tokens == WORLD * 1024
    assert two.flop == 4 * LAYERS * WORLD * (linear + attention)
    assert two.weighted_flop == pytest.approx(4 * LAYERS * (linear + 0.4 * attention))
    # q, k, v and the output of 1,024 tokens a rank, half of which belong to the other; forward, again and backward
    assert two.sent_bytes == 3 * LAYERS * 4 * 1024 * WIDTH * 2 / 2
    assert two.pieces == 2 * 2
    alone = load_of(LOW, "none", "knapsack", 1)
    assert replace(alone, sent_bytes=two.sent_bytes, pieces=two.pieces) == two
    assert alone.link_bytes() == alone.pieces == 0
    assert load_of(LOW, "g2n16", "dbsp", 1).pieces == 0


def test_chunks_of_a_sequence_are_even_and_so_are_ranks():
    topology, rng = BagTopology.parse("g1n2+g2n1+g4n1", 16), np.random.default_rng(0)
    tokens, bag = rng.choice([1, 7, 300, 301, 5000], 60), rng.integers(0, 8, 60)
    runs, ranks = chunks(tokens, bag, topology), topology.ranks[bag]
    assert np.bincount(runs.sequence, runs.length, 60).tolist() == tokens.tolist()
    assert np.array_equal(topology.bag_of_rank[runs.rank], bag[runs.sequence])
    assert (runs.length >= tokens[runs.sequence] // ranks[runs.sequence]).all()
    assert (runs.length <= -(-tokens[runs.sequence] // ranks[runs.sequence])).all()
    for here, size in zip(topology.first_rank, topology.ranks, strict=True):
        assert np.ptp(runs.by_rank(16)[here : here + size]) <= 1
