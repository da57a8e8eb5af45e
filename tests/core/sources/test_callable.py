"""Source callable: arguments and results of a user's function, and error messages."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from dbsp_core.sources import CallableSource, MaskRequest
from dbsp_core.utils.errors import UserError
from tests.support import user_masks

REQUEST = MaskRequest(layer=2, heads=3, thw=(3, 4, 5), text_tokens=7, step=4, cfg_branch=1)


def source(name, **keys):
    return CallableSource(16, 8, f"tests.support.user_masks:{name}", **keys)


def test_function_gives_one_mask_for_all_heads_or_one_each():
    shared, apart = source("band").mask(REQUEST), source("heads_apart").mask(REQUEST)
    assert shared.heads == apart.heads == 3
    assert np.array_equal(shared.bits[2].numpy(), user_masks.band(shared.grid, replace(REQUEST, step=0, cfg_branch=0)))
    assert torch.equal(apart.bits, user_masks.heads_apart(apart.grid, REQUEST))


@pytest.mark.parametrize(
    ("depends_on", "changes", "asked"),
    [("nothing", "never", (0, 0, 0)), ("layer", "never", (2, 0, 0)), ("step", "per_step", (2, 4, 1))],
)
def test_masks_depend_on_what_is_declared_alone(depends_on, changes, asked):
    mine = source("band", depends_on=depends_on)
    assert (mine.changes, mine.cache_key(REQUEST)) == (changes, asked)
    seen = replace(REQUEST, layer=asked[0], step=asked[1], cfg_branch=asked[2])
    mask = mine.mask(REQUEST)
    assert np.array_equal(mask.bits[0].numpy(), user_masks.band(mask.grid, seen))


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("integers", {}, "returned int64; compare with a threshold"),
        ("a_list", {}, "returned a list; return a bool numpy array"),
        ("transposed", {}, "returned shape [6, 9]; return [3, 5, 9], heads × query blocks × key blocks, or [5, 9]"),
        ("raises", {}, "raised KeyError: 'no such\\nlayer' for layer 2; correct it"),
        ("band", {"parameters": {"width": 3}}, "raised TypeError: band() got an unexpected keyword argument 'width'"),
        ("band", {"token_orders": ("thw", "hwt")}, "2 token_orders for 3 heads; give one order for all heads or one"),
    ],
)
def test_mistake_of_a_function_is_one_line(name, keys, message):
    with pytest.raises(UserError, match=re.escape(message)):
        source(name, **keys).mask(REQUEST)
