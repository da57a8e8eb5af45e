"""Blocks and head sizes that shipped configurations ask for are those that tests compile."""

from __future__ import annotations

import pytest
import yaml

pytest.importorskip("triton")

from dbsp_core.config import DbspConfig
from dbsp_core.models.table import MODEL_SPECS, TINY, TINY_MODELS
from dbsp_core.sources import SOURCES, MaskRequest
from dbsp_core.utils.yaml_file import shipped_configs
from scripts.checks.machine_code.variants import DTYPES, SHIPPED

FILES = sorted(shipped_configs().glob("*.yaml"))
TINY_THW = (9, 7, 13)
WITHOUT_DEFAULTS = {"file", "paro", "lowrank", "record_qk", "union", "callable"}
"""Sources that need a path, a function or parts."""


def head_dim_of(model: str) -> int:
    tiny = TINY_MODELS.get(model.removeprefix(TINY)) if model.startswith(TINY) else None
    return (tiny or MODEL_SPECS[model].signature).sizes[2]


def shape_of(source, model: str, thw: tuple[int, int, int]) -> tuple[int, int, int]:
    grid = source.grid(MaskRequest(0, 8, thw, layers=4))
    return grid.block_q, grid.block_k, head_dim_of(model)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_shapes_of_shipped_configurations_are_compiled_by_tests(file):
    values = yaml.safe_load(file.read_text())
    if "path" in values["mask"]:
        pytest.skip("its blocks are those of a mask file that the user supplies")
    config, model = DbspConfig.load(file), values["model"]
    assert config.generate.torch_dtype in DTYPES.values()
    thw = TINY_THW if model.startswith(TINY) else MODEL_SPECS[model].thw
    assert shape_of(config.mask, model, thw) in SHIPPED


def test_default_blocks_of_every_source_are_compiled_for_every_model():
    sizes = {name: spec.thw for name, spec in MODEL_SPECS.items()}
    sizes |= dict.fromkeys((f"{TINY}{name}" for name in TINY_MODELS), TINY_THW)
    made = [source() for name, source in SOURCES.items() if name not in WITHOUT_DEFAULTS]
    shapes = {shape_of(source, model, thw) for source in made for model, thw in sizes.items()}
    assert shapes <= set(SHIPPED)
    assert {(64, 64, 128), (64, 64, 64), (64, 64, 24), (64, 64, 16)} <= shapes
