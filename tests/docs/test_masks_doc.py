"""docs/masks.md and configs/ say what is true."""

from __future__ import annotations

import re
import sys

import numpy as np
import pytest
import yaml

from dbsp_core import SequenceLayout, Strategy, make_plan
from dbsp_core.config import DbspConfig
from dbsp_core.sources import SOURCES, MaskRequest, WindowSource
from scripts.reproduce.lockstep import rho_before
from tests.support.repository import ROOT

TEXT = (ROOT / "docs" / "masks.md").read_text()
WAN = MaskRequest(layer=0, heads=40, thw=(21, 45, 80))
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line.startswith("| `")]
MEASURED = {row[0]: row[-3:] for row in ROWS if row[-1]}
DEFAULTS = {f"`{name}`": SOURCES[name] for name in SOURCES} | {
    "`window` with `tile`": lambda: WindowSource(120, 120, tile=(3, 5, 8))
}


@pytest.mark.parametrize("row", MEASURED)
def test_the_table_of_sources(row):
    density, ulysses, ring = (float(value) for value in MEASURED[row])
    source = DEFAULTS[row]()
    mask = source.mask(WAN)
    assert round(mask.density, 3) == density
    for name, rho in (("U8R1", ulysses), ("U1R8", ring)):
        strategy = Strategy.parse(name)
        layout = SequenceLayout.striped(source.grid(WAN), strategy)
        plan = make_plan(mask, strategy, layout=layout)
        assert round(rho_before(mask, strategy), 3) == rho, "of a ring in lockstep"
        assert plan.rho < 1.0105, "brought to 1.01 or less"


def test_the_function_to_write_oneself(tmp_path, monkeypatch):
    text = TEXT[TEXT.index("## Write your own") :]
    code, settings = (re.search(rf"```{kind}\n(.*?)```", text, re.DOTALL).group(1) for kind in ("python", "yaml"))
    (tmp_path / "my_masks.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_masks", raising=False)  # the one of examples/, if that was loaded
    source = DbspConfig.load(yaml.safe_load(settings)).mask
    mask = source.mask(WAN)
    bits = mask.bits[0].numpy()
    assert np.diagonal(bits).all()
    assert 0.1 < mask.density < 0.9
    frame = mask.grid.q_axis.starts // (45 * 80)
    assert bits[0, frame <= 2].all()
    assert not bits[0, np.isin(frame, (5, 6, 7))].any()


def test_the_window_for_wan_has_blocks_that_are_tiles():
    mask = DbspConfig.load(ROOT / "configs" / "wan2.1-t2v-14b-window.yaml").mask.mask(WAN)
    assert (mask.counts.rows == 3 * 5 * 5).all()
    assert round(mask.density, 3) == 0.119
