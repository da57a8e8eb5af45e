"""DbspConfig: settings from YAML, a dict or flags, and every mistake said in one line."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from dbsp_core import BlockGrid, BlockMask, Strategy, save_mask
from dbsp_core.config import DbspConfig
from dbsp_core.models.settings import GenerateSettings
from dbsp_core.planning.planner_config import PlannerConfig
from dbsp_core.planning.planners import PLANNERS
from dbsp_core.sources import (
    SOURCES,
    CallableSource,
    DenseSource,
    MaskRequest,
    SpargeSource,
    SvgSource,
    UnionSource,
    WindowSource,
    parts_of,
)
from dbsp_core.sources.spec import mask_settings
from dbsp_core.utils.errors import UserError
from dbsp_core.utils.yaml_file import parse_value, read_settings
from dbsp_kernels import KERNELS
from tests.support.user_masks import band


def test_empty_configuration_gives_the_defaults(tmp_path):
    (tmp_path / "empty.yaml").write_text("# nothing set\n")
    config = DbspConfig.load(None)
    assert config == DbspConfig() == DbspConfig.load({}) == DbspConfig.load(tmp_path / "empty.yaml")
    assert config == DbspConfig.load({"strategy": None, "report": None}), "null unsets what may be unset"
    assert (config.strategy, config.planner, config.reuse, config.mask) == (
        None,
        PlannerConfig("dbsp"),
        1.02,
        DenseSource(),
    )


def test_yaml_and_dict_give_equal_settings(tmp_path):
    path = tmp_path / "dbsp.yaml"
    mask, generate = {"source": "window", "window": [3, 5, 7], "block_q": 32}, {"dtype": "bfloat16"}
    settings = {"mask": mask, "strategy": "u2r3", "generate": generate, "reuse": 1.5, "machine": "a800"}
    path.write_text(yaml.safe_dump(settings))
    made = {"mask": WindowSource(32, window=(3, 5, 7)), "generate": GenerateSettings(dtype="bfloat16")}
    expected = DbspConfig(strategy=Strategy(2, 3), reuse=1.5, machine="a800", report="out", **made)
    settings["report"] = Path("out")
    assert DbspConfig.load(settings) == expected == replace(DbspConfig.load(path), report="out")
    assert DbspConfig.load(expected) is expected
    assert DbspConfig.load(yaml.safe_load(yaml.safe_dump(expected.to_values()))) == expected


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("window:tile=[3, 5, 8],block_q=120", {"source": "window", "tile": [3, 5, 8], "block_q": 120}),
        ("callable:function=a.b:c,parameters={x: [1, 2], y: no}",
         {"source": "callable", "function": "a.b:c", "parameters": {"x": [1, 2], "y": False}}),
        ("file:path=a,b=.safetensors", {"source": "file", "path": "a", "b": ".safetensors"}),
        ("a,b=.safetensors", {"source": "file", "path": "a,b=.safetensors"}),
        ("/masks:x", {"source": "file", "path": "/masks:x"}),
    ],
)  # fmt: skip
def test_mask_in_words_equals_a_mapping(text, settings):
    assert mask_settings(text) == settings


def test_precision_is_a_dtype_or_one_of_queries_and_one_of_the_output():
    both, fingerprints = {"qkv": "int8", "out": "int8"}, set()
    for given, shown, token_bytes in (
        ("model", "model", (256, 256)),
        ("int8", "int8", (132, 256)),
        ({"qkv": "int8"}, "int8", (132, 256)),
        (both, both, (132, 132)),
    ):
        config = DbspConfig.load({"precision": given})
        assert config.to_values()["precision"] == shown
        assert DbspConfig.load(config.to_values()) == config
        assert (config.precision.token_bytes(128, 2), config.precision.out_bytes(128, 2)) == token_bytes
        assert (config.precision.no_gradients is None) == (given == "model")
        fingerprints.add(config.fingerprint)
    assert len(fingerprints) == 3


UNKNOWN = "neither a mask source nor a mask file that exists; did you mean "
MISTAKES = {
    "known keys: model, generate, mask, dense_schedule, strategy, planner": {"zzz": 1},
    "unknown mask source": {"mask": {"source": ["dense"]}},
    f"sources: {', '.join(SOURCES)}": {"mask": "zzz"},
    "'mask' in the configuration must be a mask such as sparge": {"mask": 5},
    "config must be a DbspConfig, a mapping, a YAML file or a mask, got": 5,
    "unknown key 'source' in the configuration; it belongs under 'mask'": {"source": "sparge", "planner": "paper"},
    "must be float or a list of int, got ['a']": {"mask": {"source": "svg", "temporal_heads": ["a"]}},
    f"unknown kernel 'cuda'; use one of auto, {', '.join(KERNELS)}": {"kernel": "cuda"},
    "unknown key 'cap' in 'planner'; known keys: name, reward": {"planner": {"cap": 3}},
    "'planner' in the configuration must be a mapping of name, reward, got 3": {"planner": 3},
    "reward=-0.1 must not be negative": {"planner": {"name": "paper", "reward": -0.1}},
    "planner 'snake' has no reward; remove it, or use planner paper": {"planner": {"name": "snake", "reward": 2}},
    "unknown precision 'int9'; use one of model, int8; did you mean 'int8'": {"precision": "int9"},
    "precision: out: int8 needs qkv: int8; write {qkv: int8, out: int8}": {"precision": {"out": "int8"}},
    "unknown key 'output' in 'precision'; did you mean 'out'": {"precision": {"qkv": "int8", "output": "int8"}},
    "bags.max_tokens=0 must be at least 1": {"bags": {"topology": "g1n2", "max_tokens": 0}},
    "requires that all ranks share every sequence; remove it or bags": {"bags": "g2n2", "report": "out"},
    "so a predicted mask must come first; set plan: current": {"mask": "sparge", "keys": "needed"},
    "which kernel sparge does not support; remove keys": {"keys": "needed", "kernel": "sparge"},
    "'generate' in 'transformer_2' is for both transformers": {"transformer_2": {"generate": {"steps": 3}}},
    UNKNOWN + "'window'?": "windw:window=[1,1,1]",
    "'width' is given twice": "radial:width=1,width=2",
    "'sparg' is " + UNKNOWN + "'sparge'?": "sparg",
    "kernel 'sparge' does not support this plan: it supports blocks of 64×128, 128×64 (block_q × block_k of the mask)"
    ", got 64×64; use cpu or": {"kernel": "sparge", "mask": "sparge:cdf=0.9"},
    "configuration file mine.yaml does not exist; give the path of a YAML file or a shipped one": "mine.yaml",
}
"""Messages, with the settings that give them."""


@pytest.mark.parametrize(("message", "settings"), MISTAKES.items(), ids=MISTAKES)
def test_mistake_raises_one_line(message, settings):
    with pytest.raises(UserError, match=re.escape(message)):
        DbspConfig.load(settings)


BAD_FILES = {
    "is not YAML": b"\xfe\x00\x80\x01",
    "dbsp.yaml:6: 'window' is given twice, first in ": (
        b"mask:\n  source: union\n  of:\n  - source: window\n    window: [1, 3, 3]\n    window: [3, 3, 3]\n"
    ),
    "must be a mapping, got a list": b"- planner\n- paper\n",
    ":3: unknown key 'strategie'; did you mean 'strategy'?": b"# one\n\nstrategie: U1R2\n",
    ":3: unknown key 'widht' in 'generate'; did you mean 'width'?": b"generate:\n  height: 64\n  widht: 64\n",
    f":2: unknown planner 'greedy'; use one of {', '.join(PLANNERS)}": b"kernel: cpu\nplanner: greedy\nvae: true",
    ":2: unknown key 'cdf'; it belongs under 'mask'": b"mask: {source: sparge}\ncdf: 0.9",
    ":2: 'tile' in mask source 'window' must be a list of int, got 3": b"mask: {source: window,\n  tile: 3}",
    ":2: kernel 'sparge' does not support this plan: it returns no": b"strategy: U1R2\nkernel: sparge",
    ":2: dense_schedule.first_steps=-3 must": b"dense_schedule: {last_steps: 1,\n  first_steps: -3}",
    ":3: generate.height=719 must be a multiple": b"generate:\n  width: 832\n  height: 719",
    ":2: generate.seed=99999999999999999999 must be at most": b"generate:\n  seed: 99999999999999999999",
    ":3: mask file /dev/null is a pipe or device, not a file": b"mask:\n  source: paro\n  path: /dev/null",
}
"""Messages, with the files that give them."""


@pytest.mark.parametrize(("message", "content"), BAD_FILES.items(), ids=BAD_FILES)
def test_bad_file_raises_one_line_with_its_name(tmp_path, message, content):
    path = tmp_path / "dbsp.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        DbspConfig.load(path)
    assert str(path) in str(raised.value)


MASKS = {
    "heads by number": ({"source": "svg", "temporal_heads": [0, 3]}, SvgSource(temporal_heads=(0, 3))),
    "a tile": ({"source": "window", "window": None, "tile": [1, 2, 3]}, WindowSource(tile=(1, 2, 3))),
    "name": ("window", WindowSource()),
    "name with settings": ("window:window=[1,3,3],block_q=32", WindowSource(32, window=(1, 3, 3))),
    "source": (WindowSource(32), WindowSource(32)),
    "union": ("window+dense", UnionSource((WindowSource(), DenseSource()))),
    "function": (band, CallableSource(function=band)),
    "name of a function": ("tests.support.user_masks:band", CallableSource(function="tests.support.user_masks:band")),
    "mapping with a function": (
        {"source": "callable", "function": band, "depends_on": "step"},
        CallableSource(function=band, depends_on="step"),
    ),
}


@pytest.mark.parametrize(("mask", "expected"), MASKS.values(), ids=MASKS)
def test_every_spelling_is_read_alone_and_under_mask(mask, expected):
    assert DbspConfig.load(mask) == DbspConfig(mask=mask) == DbspConfig(mask=expected)
    second = DbspConfig.load({"transformer_2": {"mask": mask}}).for_transformer("transformer_2")
    assert second.mask == expected
    parts = DbspConfig(mask={"source": "union", "of": ["dense", mask]}).mask.of
    assert parts[1:] == parts_of(expected)


def test_yaml_and_set_accept_a_mask_in_words(tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text("planner: paper\nmask: sparge:cdf=0.9,block_q=32\n", encoding="utf-8")
    assert DbspConfig.load(path).mask == SpargeSource(32, cdf=0.9)
    settings = read_settings(path, "configuration file")
    changed = settings.changed(["mask"], parse_value("window:window=[1,3,3]", "--set mask"), "--set mask")
    assert DbspConfig.load(changed).mask == WindowSource(window=(1, 3, 3))
    with pytest.raises(UserError, match="set 'mask' as a whole"):
        settings.changed(["mask", "cdf"], 0.8, "--set mask.cdf")
    path.write_text("planner: paper\nmask: sparge:cdf=3\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"my\.yaml:2: .*cdf=3"):
        DbspConfig.load(path)


@pytest.mark.parametrize(
    "written",
    [
        "mask: {source: file, path: masks/a.safetensors}",
        "mask: masks/a.safetensors",
        "mask: 'file:path=masks/a.safetensors'",
        "mask: {source: union, of: [window, {source: file, path: masks/a.safetensors}]}",
        "mask: window\ntransformer_2: {mask: {source: file, path: masks/a.safetensors}}",
    ],
)
def test_path_of_a_mask_is_relative_to_its_file(tmp_path, monkeypatch, written):
    folder = tmp_path / "settings"
    (folder / "masks").mkdir(parents=True)
    (folder / "my.yaml").write_text(written, encoding="utf-8")
    save_mask(folder / "masks" / "a.safetensors", BlockMask.dense(1, BlockGrid.uniform(64)))
    monkeypatch.chdir(tmp_path)
    config = DbspConfig.load("settings/my.yaml")
    if config.transformer_2:
        config = config.for_transformer("transformer_2")
    mask = parts_of(config.mask)[-1]
    assert (mask.path, mask.block_q) == ("settings/masks/a.safetensors", 64)
    settings = read_settings("settings/my.yaml", "configuration file")
    changed = settings.changed(("mask",), {"source": "file", "path": "b.safetensors"}, "--set mask")
    assert DbspConfig.load(changed).mask.path == "b.safetensors", "an option's path is relative to the current folder"


def test_reward_of_the_papers_planner_is_a_setting_that_ranks_compare():
    configs = [DbspConfig.load({"planner": p}) for p in ("paper", {"name": "paper", "reward": 2}, {"name": "paper"})]
    assert [config.planner.setting for config in configs] == ["paper", {"name": "paper", "reward": 2.0}, "paper"]
    assert configs[0].fingerprint == configs[2].fingerprint != configs[1].fingerprint
    assert DbspConfig.load(configs[1].to_values()) == configs[1]


def test_function_keeps_its_name_and_makes_the_mask():
    def diagonal(grid, request):
        return np.eye(grid.nq, grid.nk, dtype=bool)

    config = DbspConfig.load(diagonal)
    name = config.to_values()["mask"]["function"]
    assert name.endswith("test_function_keeps_its_name_and_makes_the_mask.<locals>.diagonal")
    assert "0x" not in repr(config)
    assert config.fingerprint == DbspConfig.load(diagonal).fingerprint
    mask = config.mask.mask(MaskRequest(0, 2, (2, 8, 16)))
    assert torch.equal(mask.bits, torch.eye(4, dtype=torch.bool).expand(2, 4, 4))
    assert config != DbspConfig.load(lambda grid, request: None)
