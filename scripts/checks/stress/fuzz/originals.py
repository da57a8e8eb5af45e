"""Sound inputs of every kind, small, from which the damaged ones are made."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from dbsp_cli.mask_tools.fit import fit_recording
from dbsp_core import BlockGrid, BlockMask, save_mask
from dbsp_core.masks.steps import DenoisingStep
from dbsp_core.reports.mask_recorder import MaskRecorder, RecordSettings
from dbsp_core.reports.run_report import CallColumns, Environment, RankTotals, RunReport
from dbsp_core.sources import MaskRequest, SyntheticSource

REPO = Path(__file__).resolve().parents[4]
THW = (3, 4, 8)


@dataclass(frozen=True)
class Originals:
    """configs, hardware: YAML;  masks: of mask files;  foreign: by suffix, files of other projects;
    recording: content by name;  report: JSON;  moments, fitted: of `lowrank`;  models: their index and transformer"""

    configs: list[str]
    hardware: list[str]
    masks: list[bytes]
    foreign: list[tuple[str, bytes]]
    recording: dict[str, bytes]
    report: str
    moments: bytes
    fitted: bytes
    models: list[tuple[str, str]]


def make_originals(folder: Path) -> Originals:
    """Makes all inputs. folder: an empty one to work in"""
    configs = [path.read_text(encoding="utf-8") for path in sorted((REPO / "configs").glob("*.yaml"))]
    hardware = [path.read_text(encoding="utf-8") for path in sorted((REPO / "configs" / "hardware").glob("*.yaml"))]
    recording, report = _recording(folder), _report().to_json()
    masks, foreign, (moments, fitted) = _mask_files(folder), _foreign(), _fitted(folder)
    return Originals(configs, hardware, masks, foreign, recording, report, moments, fitted, _models())


def _mask(layer: int, step: int = 0) -> BlockMask:
    return SyntheticSource(16, 16, density=0.3, drift=0.2).mask(MaskRequest(layer, 2, THW, step=step))


def _mask_files(folder: Path) -> list[bytes]:
    ordered = BlockMask(np.ones((2, 6, 6), dtype=bool), BlockGrid(96, 0, 16, 16, THW, ("hwt", "tile:1x2x4")))
    layered = [[_mask(layer, step) for layer in range(3)] for step in (0, 3)]
    found = []
    sequences = [BlockGrid(24, 8, 16, 16, (2, 2, 4)), BlockGrid(5, 0, 16, 16)]
    several = BlockMask.packed([BlockMask(np.ones((2, grid.nq, grid.nk), dtype=bool), grid) for grid in sequences])
    for packed in (False, True):
        save_mask(folder / "several", several, packed=packed)
        save_mask(folder / "one", _mask(0), packed=packed)
        save_mask(folder / "ordered", ordered, packed=packed)
        save_mask(folder / "grouped", layered, groups="5-9,10-", packed=packed)
        found += [(folder / name).read_bytes() for name in ("one", "ordered", "grouped", "several")]
    return found


def _foreign() -> list[tuple[str, bytes]]:
    bits = _mask(0).bits
    lut = torch.arange(6).repeat(2, 6, 1)
    found = []
    for content in ({"sparse": bits[None]}, {"masks": [bits, bits]}, {"lut": lut, "counts": torch.full((2, 6), 3)}):
        saved = io.BytesIO()
        torch.save(content, saved)
        found.append((".pt", saved.getvalue()))
    old = io.BytesIO()
    torch.save({"mask": bits}, old, _use_new_zipfile_serialization=False)
    arrays, array = io.BytesIO(), io.BytesIO()
    np.savez_compressed(arrays, mask=bits.numpy(), other=np.arange(3))
    np.save(array, bits.numpy())
    return [*found, (".pth", old.getvalue()), (".npz", arrays.getvalue()), (".npy", array.getvalue())]


def _recording(folder: Path) -> dict[str, bytes]:
    recorder = MaskRecorder(RecordSettings(str(folder / "recording")), 2)
    for step in range(3):
        recorder.begin(DenoisingStep(step))
        for layer in range(2):
            recorder.mask_made(layer, layer, _mask(layer, step), False)
            recorder.mask_used(layer, layer)
    return {path.name: path.read_bytes() for path in (folder / "recording").iterdir()}


def _fitted(folder: Path) -> tuple[bytes, bytes]:
    """Returns second moments of two layers, as `record_qk` leaves them, and what is fitted to them."""
    names = [f"{side}.{layer}" for side in ("query", "key") for layer in range(2)]
    about = {f"tokens of {name}": "96" for name in names} | {"layers": "2"}
    moments = folder / "moments"
    save_file({name: torch.eye(4).expand(2, 4, 4).contiguous() for name in names}, moments, about)
    fit_recording([moments], folder / "fitted", 2)
    return moments.read_bytes(), (folder / "fitted").read_bytes()


def _models() -> list[tuple[str, str]]:
    sizes: dict[str, object] = {"num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 12}
    wan = {"_class_name": "WanPipeline", "transformer_2": [None, None], "expand_timesteps": False}
    cog = {"_class_name": "CogVideoXPipeline", "transformer": ["diffusers", "CogVideoXTransformer3DModel"]}
    return [
        (json.dumps(wan), json.dumps(sizes | {"patch_size": [1, 2, 2]})),
        (json.dumps(cog), json.dumps(sizes | {"patch_size": 2, "patch_size_t": None})),
    ]


def _report() -> RunReport:
    floats = ("plan_ms", "density", "rho_before", "rho", "rho_bound", "seconds", "seconds_mean")
    counts = ("bytes_to_owners", "bytes_chunks", "bytes_to_sources", "bytes_busiest", "bytes_usp")
    calls = CallColumns(
        layer=[0, 1],
        step=[0, 0],
        branch=[0, 0],
        strategy=["U2R1", "U1R2"],
        replanned=[1, 0],
        **{name: [1.0, 1.5] for name in floats},
        **{name: [100, 200] for name in counts},
    )
    environment = Environment({"planner": "dbsp"}, {"torch": "2.13.0"}, ["a GPU", "a GPU"], "cpu", "float32")
    return RunReport(
        model="a/model",
        framework="para",
        world_size=2,
        strategy="auto",
        planner="dbsp",
        max_abs_diff=None,
        seconds=6.0,
        environment=environment,
        calls=calls,
        ranks=RankTotals([2.0, 2.5], [3900, 3900], {"0": [100, 100]}, {"0": [125, 75]}),
    )
