"""Decoding in tiles: who decodes which, and what is modelled of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dbsp_core.cost.hardware import load_hardware
from dbsp_core.cost.video_decode import DECODE_RATE, decode_bytes, decode_s, owners_of_tiles, tile_areas
from dbsp_core.models.decoders import COGVIDEOX, WAN, WAN_2_2
from dbsp_core.models.table import MODEL_SPECS

KNOWN = load_hardware("h200").constants


def test_owners_of_tiles():
    # 9 to rank 0, 7 to rank 1, 5 to rank 1 (12), 4 to rank 0 (13), 3 to rank 1 (15).
    assert owners_of_tiles([3, 9, 5, 7, 4], 2) == [1, 0, 1, 1, 0]
    assert owners_of_tiles([1, 1], 4) == [0, 1]
    assert owners_of_tiles([2, 2, 2, 2], 2) == [0, 1, 0, 1]


def test_tiles_are_those_of_diffusers_loop():
    # Rows from 0 and 24, the second cut at 40; columns from 0, 24 and 48, the last cut at 60.
    assert tile_areas(WAN, 40, 60) == [32 * 32, 32 * 32, 32 * 12, 16 * 32, 16 * 32, 16 * 12]


@pytest.mark.parametrize(
    ("name", "latents"),
    [("wan2.1-t2v-14b", (21, 90, 160)), ("wan2.2-ti2v-5b", (31, 44, 80)), ("cogvideox-5b", (13, 60, 90))],
)
def test_latents_of_the_usual_video(name, latents):
    assert MODEL_SPECS[name].latents == latents


def test_by_hand():
    known = replace(KNOWN, linear_flops_per_s=3e12, exchange_bytes_per_s=1e12)
    one = replace(WAN, flops=1e9)
    second = 2 * 1e9 / (DECODE_RATE * 3e12)  # of one position, two frames
    each = decode_s(one, (2, 40, 60), known, 2, shared=False, one_node=True)
    assert each == pytest.approx(40 * 60 * second)
    shared = decode_s(one, (2, 40, 60), known, 2, shared=True, one_node=True)
    # 1024 + 512 + 384 and 1024 + 512 + 192 positions; each sends 4 frames of 3 channels, 8x8 pixels of 2 bytes.
    assert shared == pytest.approx(1920 * second + 1920 * 2 * 4 * 3 * 64 * 2 / 1e12)


@pytest.mark.parametrize("decoder", [WAN, WAN_2_2, COGVIDEOX])
def test_more_ranks_are_never_slower_and_tiles_need_less_memory(decoder):
    latents = (21, 90, 160)
    seconds = [decode_s(decoder, latents, KNOWN, ranks, shared=True, one_node=True) for ranks in (1, 2, 4, 8, 16)]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] / seconds[3] > 5
    assert decode_bytes(decoder, latents, shared=True) < decode_bytes(decoder, latents, shared=False)
    slow = decode_s(decoder, latents, KNOWN, 16, shared=True, one_node=False)
    assert slow >= seconds[-1]
