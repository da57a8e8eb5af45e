"""Settings of mask sources that make no sense are rejected in one line that says why."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dbsp_core.config import DbspConfig
from dbsp_core.utils.errors import UserError

BAND = "tests.support.user_masks:band"
MISTAKES: dict[str, list[tuple[dict[str, Any], str]]] = {
    "sparge": [
        ({"cdf": 0.9, "topk": 0.5}, "takes only one of cdf, topk and sparsity"),
        ({"sparsity": 1.0}, "sparsity=1.0 must be at least 0 and below 1"),
        ({"topk": [0.5, 1.5]}, "topk=[0.5, 1.5] must be above 0 and at most 1"),
        ({"topk": []}, "topk=[] must be above 0 and at most 1"),
        ({"dense_text": "both"}, "must be bool or 'rows' or 'columns', got 'both'"),
        ({"cdf": float("nan")}, "cdf=nan"),
        ({"cdf": 0.9, "block_k": 1 << 17}, "at most 65536"),
    ],
    "sol": [
        ({"tau": float("nan")}, "tau=nan must be a finite number"),
        ({"thresh_type": "full"}, "must be 'diag' or 'exact', got 'full'"),
    ],
    "subblock": [
        ({"cells_k": 5}, "cells_k=5 must divide block_k=64"),
        ({"sparsity": [0.5, 1.0]}, "sparsity=[0.5, 1.0] must be at least 0 and below 1"),
        ({"multiple": 0}, "multiple=0 must be at least 1"),
    ],
    "cube": [
        ({"topk": 0.0}, "topk=0.0 must be above 0 and at most 1"),
        ({"tile": [4, 4]}, "tile=[4, 4] must be at least 1 × 1 × 1"),
    ],
    "ssta": [
        ({"block_q": 100}, "block_q=100 must divide a tile's 384 tokens"),
        ({"padding": "zeros"}, "must be 'absent' or 'none', got 'zeros'"),
        ({"weight": 1.5}, "weight=1.5 must lie between 0 and 1"),
    ],
    "vsa": [
        ({"sparsity": 1.0}, "sparsity=1.0 must be at least 0 and below 1"),
        ({"tile": [4, 8, 8]}, "set block_q and block_k to 256"),
    ],
    "sla": [
        ({"topk": 0.0}, "topk=0.0 must be above 0 and at most 1"),
        ({"feature": "tanh"}, "must be 'softmax' or 'elu' or 'relu', got 'tanh'"),
    ],
    "lowrank": [
        ({"topk": 0.2}, "needs the path of a fitted file; fit one with: dbsp masks fit"),
        ({"path": "/no/such", "topk": 0.2}, "fitted file /no/such does not exist; fit one"),
    ],
    "union": [
        ({}, "needs two masks or more"),
        ({"of": "window"}, "must be a list of masks"),
        ({"of": ["window", "spage:cdf=0.9"]}, "did you mean 'sparge'"),
    ],
    "synthetic": [
        ({"preset": "wan"}, "wan2.1-t2v-14b"),
        ({"density": 1.5}, "density=1.5 must lie between 0 and 1"),
    ],
    "window": [
        ({"window": [3, 3]}, "needs three sizes of at least 1"),
        ({"tile": [3, 0, 3]}, "tile=[3, 0, 3] needs three sizes of at least 1"),
    ],
    "radial": [
        ({"width": 0.0}, "must be a positive share"),
    ],
    "svg": [
        ({"frames": 0}, "frames=0 must be at least 1"),
        ({"temporal_heads": 1.5}, "temporal_heads=1.5 must be a share"),
        ({"temporal_heads": [-1]}, "must be head numbers, from 0"),
    ],
    "callable": [
        ({}, "needs function: package.module:name, got ''"),
        ({"function": "no_such_masks:band"}, "importing no_such_masks failed"),
        ({"function": "tests.support.user_masks:bnad"}, "tests.support.user_masks has no such name; name a function"),
        ({"function": "tests.support.user_masks:NOT_A_FUNCTION"}, "names an int, which cannot be called"),
        ({"function": BAND, "parameters": {1: 2}}, f"parameters of {BAND} need names, 1 is none"),
    ],
    "dense": [({"block_q": 0}, "block_q=0")],
}


@pytest.mark.parametrize("source", MISTAKES)
def test_bad_settings_are_rejected_in_one_line(source):
    for settings, message in MISTAKES[source]:
        with pytest.raises(UserError, match=re.escape(message)):
            DbspConfig.load({"mask": {"source": source, **settings}})
