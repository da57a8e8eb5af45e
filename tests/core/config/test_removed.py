"""A configuration that names something removed is told what to write instead."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dbsp_core.config import DbspConfig
from dbsp_core.utils.errors import REMOVED_KEYS, REMOVED_VALUES, SettingError, UserError

SETTINGS_OF_REMOVED_KEYS: dict[str, dict[str, Any]] = {
    "budget": {"reuse": {"budget": 0.3}},
    "exchange_cost": {"planner": {"exchange_cost": 0.1}},
    "memory_limit": {"planner": {"memory_limit": "8GiB"}},
    "target_rho": {"planner": {"name": "dbsp", "target_rho": 1.01}},
    "paper": {"planner": {"name": "paper", "paper": {"reward": 2}}},
    "balancer": {"bags": {"topology": "g2n2", "balancer": "dbsp"}},
    "pooled_keys": {"mask": {"source": "sol", "pooled_keys": True}},
}
"""Settings that have each removed key, where it used to be."""
SETTINGS_OF_REMOVED_VALUES: dict[tuple[str, str], dict[str, Any]] = {
    ("source", "vllm_selector"): {"mask": {"source": "vllm_selector", "selector": "mine:TopBlocks"}},
    ("layout", "learned"): {"layout": "learned"},
    ("layout", "local"): {"layout": "local"},
    ("planner", "local"): {"planner": "local", "keys": "needed"},
    ("planner", "knapsack"): {"planner": "knapsack"},
    ("keys", "kept"): {"keys": "kept"},
    ("keys", "auto"): {"keys": "auto"},
    ("keys", "ring"): {"keys": "ring"},
}
"""Settings that have each removed value, where it used to be."""


def test_every_removed_setting_is_refused_with_advice():
    assert SETTINGS_OF_REMOVED_KEYS.keys() == REMOVED_KEYS.keys()
    assert SETTINGS_OF_REMOVED_VALUES.keys() == REMOVED_VALUES.keys()
    for key, settings in SETTINGS_OF_REMOVED_KEYS.items():
        _require_refusal(settings, key, REMOVED_KEYS[key])
    for (key, value), settings in SETTINGS_OF_REMOVED_VALUES.items():
        _require_refusal(settings, f"{key}: {value}", REMOVED_VALUES[key, value])


def _require_refusal(settings: dict[str, Any], shown: str, advice: str) -> None:
    with pytest.raises(SettingError, match=re.escape(f"{shown} was removed; {advice}")) as refused:
        DbspConfig.load(settings)
    assert isinstance(refused.value, UserError)
