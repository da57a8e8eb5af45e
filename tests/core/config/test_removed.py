"""Whoever names something removed is given what to write instead, and where it was named."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

import dbsp_diffusers
from dbsp_core.config import DbspConfig
from dbsp_core.utils.errors import REMOVED_KEYS, REMOVED_VALUES, SettingError, UserError
from dbsp_core.utils.yaml_file import read_settings

VALUES: dict[str, Any] = {
    "bags.balancer": "dbsp",
    "cost_model": "a800",
    "debug": True,
    "dtype": "float32",
    "exchange": {"precision": "int8"},
    "keys": "needed",
    "layout": "striped",
    "mask.pooled_keys": True,
    "planner.exchange_cost": 0.1,
    "planner.memory_limit": "8GiB",
    "planner.name": "paper",
    "planner.paper": {"reward": 2},
    "planner.target_rho": 1.01,
    "record": "masks",
    "reuse.budget": 0.3,
    "reuse.mode": "sync",
    "reuse.threshold": 1.1,
    "video": {"steps": 30},
}
"""Each removed key, where it used to be, with a value that it had."""
SETTINGS_OF_REMOVED_VALUES: dict[tuple[str, str], dict[str, Any]] = {
    ("source", "vllm_selector"): {"mask": {"source": "vllm_selector", "selector": "mine:TopBlocks"}},
    ("planner", "local"): {"planner": "local"},
    ("planner", "knapsack"): {"planner": "knapsack"},
}
"""Settings that have each removed value; others are of arguments that are no settings any more."""


def advice_for(path: str) -> str:
    name = path if path in REMOVED_KEYS else path.rpartition(".")[2]
    return f"{name} was removed; {REMOVED_KEYS[name]}"


def nested(path: str) -> dict[str, Any]:
    section, dot, name = path.partition(".")
    if not dot:
        return {path: VALUES[path]}
    return {section: {"source": "sol"} | {name: VALUES[path]} if section == "mask" else {name: VALUES[path]}}


def test_every_removed_key_is_tried():
    assert {path if path in REMOVED_KEYS else path.rpartition(".")[2] for path in VALUES} == set(REMOVED_KEYS)


@pytest.mark.parametrize("path", VALUES)
def test_a_removed_key_is_named_in_a_mapping_by_its_line_in_a_file_and_on_the_command_line(path, tmp_path):
    advice, file = advice_for(path), tmp_path / "my.yaml"
    with pytest.raises(SettingError, match=re.escape(advice)):
        DbspConfig.load(nested(path))
    if "." not in path:
        with pytest.raises(UserError, match=re.escape(advice)):
            dbsp_diffusers.enable(None, **{path: VALUES[path]})
    file.write_text("vae: true\n" + yaml.safe_dump(nested(path), default_flow_style=False, sort_keys=False))
    lines = file.read_text().splitlines()
    line = 1 + next(n for n, text in enumerate(lines) if text.strip().startswith(f"{path.rpartition('.')[2]}:"))
    with pytest.raises(UserError, match=re.escape(f"my.yaml:{line}: {advice}")):
        DbspConfig.load(file)
    file.write_text("reuse: 1.2\nplanner: dbsp\nbags: {topology: g2n1}\nmask: {source: sol}\n")  # sections of today
    settings = read_settings(file, "configuration file")
    with pytest.raises(UserError, match=re.escape(f"--set {path}: {advice}")) as raised:
        DbspConfig.load(settings.changed(path.split("."), VALUES[path], f"--set {path}"))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("path", ["exchange.precision", "video.steps", "planner.paper.reward"])
def test_a_key_within_a_removed_section_on_the_command_line(path, tmp_path):
    (tmp_path / "my.yaml").touch()
    settings = read_settings(tmp_path / "my.yaml", "configuration file")
    with pytest.raises(UserError, match=re.escape(f"--set {path}: ") + ".* was removed; "):
        DbspConfig.load(settings.changed(path.split("."), 2, f"--set {path}"))


@pytest.mark.parametrize("path", ["keys", "reuse.mode"])
def test_a_removed_key_of_a_second_transformer(path):
    with pytest.raises(SettingError, match=re.escape(advice_for(path))):
        DbspConfig.load({"transformer_2": nested(path)})


def test_a_removed_value():
    assert SETTINGS_OF_REMOVED_VALUES.keys() == {one for one in REMOVED_VALUES if one[0] not in ("layout", "keys")}
    for (key, value), settings in SETTINGS_OF_REMOVED_VALUES.items():
        advice = f"{key}: {value} was removed; {REMOVED_VALUES[key, value]}"
        with pytest.raises(SettingError, match=re.escape(advice)):
            DbspConfig.load(settings)
