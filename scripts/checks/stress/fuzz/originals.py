"""Sound inputs of every kind, small, from which the damaged ones are made."""

from __future__ import annotations

import json
from dataclasses import fields
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

THW = (3, 4, 8)


def write_originals(folder: Path) -> None:
    """Writes masks/, foreign/ (of other projects), recording/, models/, report.json, moments and fitted."""
    for name in ("masks", "foreign", "models"):
        (folder / name).mkdir()
    _masks(folder / "masks")
    _foreign(folder / "foreign")
    _recording(folder / "recording")
    _models(folder / "models")
    _fitted(folder)
    (folder / "report.json").write_text(_report().to_json(), encoding="utf-8")


def _mask(layer: int, step: int = 0) -> BlockMask:
    return SyntheticSource(16, 16, density=0.3, drift=0.2).mask(MaskRequest(layer, 2, THW, step=step))


def _masks(folder: Path) -> None:
    ordered = BlockMask(np.ones((2, 6, 6), dtype=bool), BlockGrid(96, 0, 16, 16, THW, ("hwt", "tile:1x2x4")))
    sequences = [BlockGrid(24, 8, 16, 16, (2, 2, 4)), BlockGrid(5, 0, 16, 16)]
    several = BlockMask.packed([BlockMask(np.ones((2, grid.nq, grid.nk), dtype=bool), grid) for grid in sequences])
    layered = [[_mask(layer, step) for layer in range(3)] for step in (0, 3)]
    for packed in (False, True):
        for name, mask in {"one": _mask(0), "ordered": ordered, "several": several}.items():
            save_mask(folder / f"{name}-{packed}.safetensors", mask, packed=packed)
        save_mask(folder / f"grouped-{packed}.safetensors", layered, groups="5-9,10-", packed=packed)


def _foreign(folder: Path) -> None:
    bits = _mask(0).bits
    torch.save({"sparse": bits[None]}, folder / "sparse.pt")
    torch.save({"masks": [bits, bits]}, folder / "masks.pt")
    torch.save({"lut": torch.arange(6).repeat(2, 6, 1), "counts": torch.full((2, 6), 3)}, folder / "lut.pt")
    torch.save({"mask": bits}, folder / "old.pth", _use_new_zipfile_serialization=False)
    np.savez_compressed(folder / "arrays.npz", mask=bits.numpy(), other=np.arange(3))
    np.save(folder / "array.npy", bits.numpy())


def _recording(folder: Path) -> None:
    recorder = MaskRecorder(RecordSettings(str(folder)), 2)
    for step in range(3):
        recorder.begin(DenoisingStep(step))
        for layer in range(2):
            recorder.mask_made(layer, layer, _mask(layer, step), False)
            recorder.mask_used(layer, layer)


def _fitted(folder: Path) -> None:
    """Writes second moments of two layers, as `record_qk` leaves them, and what is fitted to them."""
    names = [f"{side}.{layer}" for side in ("query", "key") for layer in range(2)]
    about = {f"tokens of {name}": "96" for name in names} | {"layers": "2"}
    moments = folder / "moments.safetensors"
    save_file({name: torch.eye(4).expand(2, 4, 4).contiguous() for name in names}, moments, about)
    fit_recording([moments], folder / "fitted.safetensors", 2)


def _models(folder: Path) -> None:
    sizes: dict[str, object] = {"num_layers": 2, "num_attention_heads": 4, "attention_head_dim": 12}
    wan = {"_class_name": "WanPipeline", "transformer_2": [None, None], "expand_timesteps": False}
    cog = {"_class_name": "CogVideoXPipeline", "transformer": ["diffusers", "CogVideoXTransformer3DModel"]}
    patches = {"patch_size": [1, 2, 2]}, {"patch_size": 2, "patch_size_t": None}
    for name, index, patch in zip(("wan", "cog"), (wan, cog), patches, strict=True):
        (folder / name / "transformer").mkdir(parents=True)
        (folder / name / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
        (folder / name / "transformer" / "config.json").write_text(json.dumps(sizes | patch), encoding="utf-8")


def _report() -> RunReport:
    columns: dict[str, list[object]] = {column.name: [1, 2] for column in fields(CallColumns)}
    return RunReport(
        model="a/model",
        framework="para",
        world_size=2,
        strategy="auto",
        planner="dbsp",
        max_abs_diff=None,
        seconds=6.0,
        environment=Environment({"planner": "dbsp"}, {"torch": "2.13.0"}, ["a GPU", "a GPU"], "cpu", "float32"),
        calls=CallColumns(**columns | {"strategy": ["U2R1", "U1R2"]}),  # type: ignore[arg-type]
        ranks=RankTotals([2.0, 2.5], [3900, 3900], {"0": [100, 100]}, {"0": [125, 75]}),
    )
