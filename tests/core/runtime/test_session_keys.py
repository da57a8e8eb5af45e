"""Sessions choose which keys are sent by how often masks change: exact with all keys, and with needed ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dbsp_core.config import DbspConfig
from dbsp_core.sources import DenseSource, SpargeSource, SyntheticSource, WindowSource
from dbsp_kernels import KERNELS
from tests.core.runtime.session_cases import (
    Growing,
    Unread,
    run_passes,
)


@pytest.mark.parametrize(
    ("mask", "keys"),
    [
        (WindowSource(), "needed"),
        (DenseSource(), "needed"),
        (SyntheticSource(), "needed"),
        (SyntheticSource(drift=0.02), "all"),
        (SpargeSource(cdf=0.9), "all"),
    ],
)
def test_masks_that_never_change_are_sent_the_keys_that_they_need(mask, keys):
    layouts = {planner: DbspConfig(mask=mask, planner=planner).layout for planner in ("dbsp", "paper")}
    assert DbspConfig(mask=mask).keys == keys
    assert layouts == {"dbsp": "contiguous" if keys == "needed" else "striped", "paper": "contiguous"}


def test_a_plan_of_masks_that_grow_is_kept_as_all_keys_come(threads):
    passes = [{"timestep": 900.0 - step} for step in range(8)]
    for found in threads(4).run(run_passes, {"mask": Growing(8, 8), "reuse": 9.0}, "U1R4", passes):
        assert (found.worst <= 1e-5, found.plans[-1], found.keys) == (True, 1, {"all"})


@pytest.mark.parametrize(("ragged", "keys"), [(True, "needed"), (False, "all")])
def test_keys_that_no_row_reads_are_sent_to_kernels_of_whole_heads(monkeypatch, threads, ragged, keys):
    monkeypatch.setitem(KERNELS, "cpu", replace(KERNELS["cpu"], ragged_rows=ragged))
    settings = {"mask": Unread(16, 16), "kernel": "cpu"}
    for found in threads(5).run(run_passes, settings, "U5R1", [{"timestep": 900.0}], 1):
        assert (found.worst <= 1e-5, found.keys) == (True, {keys})


def test_the_layout_does_not_depend_on_the_kernel(monkeypatch):
    monkeypatch.setenv("DBSP_KERNEL", "sparge")
    config = DbspConfig(mask=WindowSource())
    assert (config.keys, config.layout) == ("all", "contiguous")
