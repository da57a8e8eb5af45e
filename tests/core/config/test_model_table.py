"""Sizes of the models in the table, and the description of its fields."""

from __future__ import annotations

from dbsp_cli.modelled import linear_flops, passes
from dbsp_core.models.table import MODEL_SPECS


def test_the_zoo_has_the_paper_models_sizes():
    wan, cog = MODEL_SPECS["wan2.1-t2v-14b"], MODEL_SPECS["cogvideox1.5-5b"]
    assert (wan.tokens, wan.width, passes(wan)) == (21 * 3600, 5120, 100)
    assert (cog.tokens, cog.width) == (21 * 4080 + 226, 3072)
    keys = 2 * 40 * 5120**2  # of cross-attention, which are left out
    assert 12e9 < linear_flops(wan) / 2 / wan.tokens < 14.3e9 - keys + 1e9
    assert MODEL_SPECS["wan2.1-t2v-1.3b"].tokens == 32760
