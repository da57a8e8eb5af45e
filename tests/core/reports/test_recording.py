"""Recordings: what a run's masks were, for any limits; and the run is the same with or without."""

from __future__ import annotations

import json
from typing import Any
from unittest import mock

import pytest
import torch

from dbsp_cli.mask_tools.recording import Recording
from dbsp_core import BlockGrid, BlockMask
from dbsp_core.config import DbspConfig
from dbsp_core.masks.steps import DenoisingStep
from dbsp_core.reports.mask_recorder import INDEX, MaskRecorder, RecordSettings
from dbsp_core.sources import MaskRequest, SyntheticSource
from dbsp_core.utils.errors import UserError
from tests.core.runtime.session_cases import Session
from tests.support.generators import random_bits

GRID = BlockGrid(105, 0, 8, 8, (3, 5, 7))
MOMENTS = [DenoisingStep(step, branch) for step in range(3) for branch in range(2)]


def a_mask(seed, grid=GRID):
    return BlockMask(random_bits(2, grid, seed), grid)


def run(recorder, seeds, moments=MOMENTS, lasting=False):
    """Records one pass per moment; seeds[i][layer] is the seed of a layer's mask in pass i."""
    for moment, layers in zip(moments, seeds, strict=True):
        recorder.begin(moment)
        for layer, seed in enumerate(layers):
            recorder.mask_made(layer, layer, a_mask(seed), lasting)
            recorder.mask_used(layer, layer)


def new(folder, of_model=2, **settings):
    return MaskRecorder(RecordSettings(str(folder), **settings), of_model)


def test_masks_are_read_back_and_written_once(tmp_path):
    seeds, folder = [(0, 1), (0, 0), (2, 1), (3, 4), (0, 1), (4, 2)], tmp_path
    run(new(folder), seeds)
    recording = Recording.read(folder)
    assert list(recording.passes) == MOMENTS
    for moment, layers in zip(MOMENTS, seeds, strict=True):
        for layer, seed in enumerate(layers):
            assert torch.equal(recording.mask(layer, moment).bits, a_mask(seed).bits)
            assert recording.mask(layer, moment).grid == GRID
    content = json.loads((folder / INDEX).read_text())
    distinct = {seed for layers in seeds for seed in layers}
    assert len(list(folder.glob("*.safetensors"))) == len(distinct)
    assert content["bytes"] == sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    assert content["stopped"] is None


@pytest.mark.parametrize("lasting", [False, True])
def test_recording_has_every_nth_step_and_chosen_layers_alone(tmp_path, lasting):
    run(new(tmp_path, every=2, layers=frozenset({1})), [(10 * i, 10 * i + 1) for i in range(6)], lasting=lasting)
    recording = Recording.read(tmp_path)
    assert list(recording.passes) == [m for m in MOMENTS if m.step != 1]
    assert recording.recorded_layers == (1,)
    assert torch.equal(recording.mask(1, DenoisingStep(2, 1)).bits, a_mask(51).bits)
    assert len(list(tmp_path.glob("*.safetensors"))) == 4
    with pytest.raises(ValueError, match=r"no mask of layer 0 at step 2, branch 0; it has layers \[1\]"):
        recording.mask(0, DenoisingStep(2))


def test_lasting_mask_of_a_skipped_step_is_recorded_later(tmp_path):
    recorder = new(tmp_path, every=2)
    for step in range(3):
        recorder.begin(DenoisingStep(step))
        for layer in range(2):
            if step < 2:  # the mask of step 1 goes on to step 2
                recorder.mask_made(layer, layer, a_mask(10 * step + layer), True)
            recorder.mask_used(layer, layer)
    recording = Recording.read(tmp_path)
    assert torch.equal(recording.mask(1, DenoisingStep(2)).bits, a_mask(11).bits)
    assert not recorder._pending


def test_limit_stops_the_recording_with_one_warning(tmp_path, capsys):
    recorder = new(tmp_path, limit=2000)
    run(recorder, [(10 * i, 10 * i + 1) for i in range(6)])
    assert sum(p.stat().st_size for p in tmp_path.glob("*.safetensors")) <= 2000
    recording = Recording.read(tmp_path)
    assert 0 < len(recording.passes) < 6
    assert "the limit of 2000 bytes was reached at step" in recording.stopped
    for number, moment in enumerate(recording.passes):
        assert torch.equal(recording.mask(1, moment).bits, a_mask(10 * number + 1).bits)
    err = capsys.readouterr().err
    assert err.count("\n") == err.count("stopped recording masks") == 1


def test_older_recording_is_not_overwritten(tmp_path, capsys):
    run(new(tmp_path), [(0, 1)], [DenoisingStep()])
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    run(new(tmp_path), [(2, 3)], [DenoisingStep()])
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert "already has a recording, maybe of a run in progress; give another" in capsys.readouterr().err


def test_failing_disk_stops_the_recording_with_one_warning(tmp_path, capsys, monkeypatch):
    full = mock.Mock(side_effect=OSError("No space left on device"))
    monkeypatch.setattr("dbsp_core.reports.mask_recorder.write_atomically", full)
    run(new(tmp_path), [(10 * i, 10 * i + 1) for i in range(6)])
    assert capsys.readouterr().err.count("stopped recording masks") == 1


def test_damaged_files_raise(tmp_path):
    run(new(tmp_path), [(0, 1)], [DenoisingStep()])
    for file in tmp_path.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(ValueError, match="is damaged"):
        Recording.read(tmp_path).mask(0, DenoisingStep())
    (tmp_path / INDEX).write_text('{"passes": 3}')
    with pytest.raises(UserError, match="is not a recording of masks"):
        Recording.read(tmp_path)


def test_settings_of_recording_are_read_from_the_environment(monkeypatch):
    monkeypatch.setenv("DBSP_RECORD", "0")
    assert RecordSettings.from_environment(DbspConfig().record) == RecordSettings()
    for name, value in {"": "out", "_EVERY": "5", "_LAYERS": "0,3-4", "_LIMIT": "1.5MiB"}.items():
        monkeypatch.setenv(f"DBSP_RECORD{name}", value)
    expected = RecordSettings("out", 5, frozenset({0, 3, 4}), 3 * 2**19)
    assert RecordSettings.from_environment(DbspConfig().record) == expected


def recorded(rank: int, world: int, settings: dict[str, Any], strategy: str) -> float:
    """Runs three steps of two CFG passes. Returns how far they are from one process's."""
    session = Session(settings, strategy, layers=2, steps=3, heads=6)
    return max(session.attend(timestep, thw=(3, 5, 7)) for timestep in (900.0, 600.0, 300.0) for _ in range(2))


@pytest.mark.usefixtures("debug")
def test_run_over_ranks_is_recorded_and_unchanged(threads, tmp_path):
    drifting = SyntheticSource(density=0.3, drift=0.3, block_q=8, block_k=8)
    settings = {"mask": drifting, "dense_schedule": {"first_layers": 1}, "record": str(tmp_path)}
    assert max(threads(3).run(recorded, settings, "U1R3")) <= 1e-5
    recording = Recording.read(tmp_path)
    assert list(recording.passes) == MOMENTS
    for moment in MOMENTS:
        assert recording.mask(0, moment).bits.all(), "dense by schedule"
        expected = drifting.mask(MaskRequest(1, 6, (3, 5, 7), step=moment.step))
        assert torch.equal(recording.mask(1, moment).bits, expected.bits)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 + 3  # branches share masks, steps the dense layer's
